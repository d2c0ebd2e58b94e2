"""Attention of GPUs over the paged K/V cache in Triton, and the choice among all backends.

Knows the tensors of one layer; nothing of a model's other layers.
"""
