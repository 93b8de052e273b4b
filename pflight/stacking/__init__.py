"""One module that stands for many clients at once, and what tells whether it can."""
