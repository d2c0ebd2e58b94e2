"""Which sequences run in a step, with how many tokens, in which K/V blocks.

Owns the state of a sequence, the block pool and the prefix cache. Knows token ids and block ids;
nothing of tensors, models or sessions.
"""
