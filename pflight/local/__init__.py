"""One client in local training: its module, the Trainer behind it, its samples, a limit of time."""
