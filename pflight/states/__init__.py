"""States of models: their layouts, heads and layers, and the server's models."""
