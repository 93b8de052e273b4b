"""What shows how a run is going: progress, tables, TensorBoard and pictures."""
