"""Token histories: what is known of each sequence, by position, and for how long.

Owns creating, appending, eviction and release, the table in which kernels find sequences, and what
a sequence does with its pool. Does not know batches, streams or the wire.
"""
