"""The memory of all shared pools: an arena, an index over all texts, and lookups in it.

Owns how texts lie in the arena, how an n-gram is found there, and when a pool's draft replaces the
sequence's own (`propose.py`). Does not know when a text enters or leaves its pool
(`drafter.pools`), nor sequences.
"""
