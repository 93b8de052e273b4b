"""Monitors of a run: progress, tables, TensorBoard and pictures."""
