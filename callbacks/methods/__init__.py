"""The server half of each algorithm, one file per method."""
