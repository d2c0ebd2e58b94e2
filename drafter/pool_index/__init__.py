"""The memory of all shared pools: an arena, an index over all texts, and lookups in it.

Owns how texts lie in the arena and how an n-gram is found there. Does not know when a text enters
or leaves its pool (`drafter.pools`), nor sequences.
"""
