"""One module that stands for many clients at once, how these train, and whether it can at all."""
