"""How samples are dealt to clients, and clients to groups."""
