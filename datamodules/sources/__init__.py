"""Data sets, and how their files are read."""
