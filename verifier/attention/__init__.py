"""Attention over a paged K/V cache: the cache, one interface, backends without kernels of our own.

Knows the step's layout and the tensors of one layer; nothing of a model's other layers.
"""
