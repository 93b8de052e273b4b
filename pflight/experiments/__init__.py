"""Comparisons of many methods over many seeds."""
