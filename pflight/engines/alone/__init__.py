"""Local training of one client after another."""
