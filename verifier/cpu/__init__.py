"""The decoder on a CPU: kernels whose sums have one order, whatever the batch."""
