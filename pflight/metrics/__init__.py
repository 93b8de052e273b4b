"""Metrics of every client, and their values over all clients."""
