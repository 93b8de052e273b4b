"""Data sets, and the readers of their files."""
