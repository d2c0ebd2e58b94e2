"""A step as flat arrays, and the protocol of a model that runs it.

Owns the layout of a batch, its expansion for single-query attention and its padding rules. Knows
nothing of sequences: a batch entry is token ids, a length and a block table.
"""
