"""The checks at load that a model is computed as transformers computes it: one per decoder, the
text that they share, and transformers' reference.

Knows the decoders; nothing of flags, memory or the engine. `comparison.py` and `cpu_check.py` know
neither torch nor transformers.
"""
