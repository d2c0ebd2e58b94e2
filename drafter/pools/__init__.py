"""Shared pools: which texts they store, for how long, and their snapshots on disk.

Owns feeding, limits, eviction (`store.py`), the task that does this work (`keeper.py`), and the
snapshots. Does not know how texts are indexed (`drafter.pool_index`), nor sequences.
"""
