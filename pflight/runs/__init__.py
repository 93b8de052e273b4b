"""Runs: folders, checkpoints, client memory, ranks and signals."""
