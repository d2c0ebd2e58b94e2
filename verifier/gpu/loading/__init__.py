"""From a described checkpoint to the weights of the decoder for GPUs.

Knows tensors by their names and the device that they go to; computes nothing.
"""
