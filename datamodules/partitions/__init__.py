"""Partitions: how samples are dealt to clients, and clients to clusters."""
