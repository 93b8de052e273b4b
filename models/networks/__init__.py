"""The networks of the papers, and small ones."""
