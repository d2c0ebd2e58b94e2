"""Triton kernels of the decoder: each does in one launch what takes torch several.

`verifier.gpu.plain` has the same operations in torch, the oracle of these. Arithmetic is in
float32 and is rounded once, at the end.
"""
