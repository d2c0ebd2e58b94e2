"""Token histories: the known tokens of each sequence, by position, and how long they are stored.

Owns creation, appending, eviction and release (`store.py`), the table in which kernels find
sequences, and how a sequence uses its pool. Does not know batches, RPCs or the wire.
"""
