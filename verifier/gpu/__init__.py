"""What computes a step on a GPU."""
