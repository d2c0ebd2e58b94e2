"""A step as flat arrays, and the protocol of a model that runs it.

Owns the layout of a batch, and the step of a model whose logits come to the host. Knows nothing of
sequences: a batch entry is token ids, a length and a block table.
"""
