"""Shared pools: which texts they keep, for how long, and their snapshots on disk.

Owns feeding, limits, eviction, the order of work, and the snapshot format. Does not know how texts
are indexed (`drafter.pool_index`), nor which sequence a text came from.
"""
