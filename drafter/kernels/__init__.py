"""How kernels are compiled, and how they read and write memory.

Knows nothing of what any kernel computes.
"""
