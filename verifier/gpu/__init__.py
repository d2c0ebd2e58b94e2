"""A decoder for GPUs, in torch and Triton, over the paged K/V cache.

Computes the models that `verifier.checkpoint` describes; knows neither transformers nor the
engine. Without Triton, on a CPU, plain torch computes the same.
"""
