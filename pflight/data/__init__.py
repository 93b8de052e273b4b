"""The clients' data: data modules, loaders and cohorts."""
