"""The sampler's Triton kernels: adjust, weigh, cut, choose, decide.

Pointers, scalars and blocks have no annotations: Triton compiles the source, and takes them for its
own types.
"""
