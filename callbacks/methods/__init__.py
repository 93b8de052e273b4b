"""The server half of each algorithm: one file a method, with what only it needs."""
