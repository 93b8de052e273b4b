"""Partitions of samples among clients, and of clients among clusters."""
