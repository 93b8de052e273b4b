"""Local training of many clients at once, in one module for all."""
