"""The server callback of each algorithm, one file per method."""
