"""Local training of many clients at once, in one module that stands for them all."""
