"""Networks: those of the papers, and small ones."""
