"""Networks: the papers' networks, and small ones."""
