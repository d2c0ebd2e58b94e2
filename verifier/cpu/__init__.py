"""The own decoder for CPUs: kernels whose sums have one order, whatever the batch.

Owns packed weights and their loading, K/V, and the threads. Knows a step as a layout; nothing of
sequences or flags, and neither torch nor transformers.
"""
