"""Token histories: the known tokens of each sequence, by position, and how long they are stored.

Owns creation, appending and release (`store.py`), eviction (`lru.py`), and how a sequence uses its
pool (`pool_drafts.py`). Does not know batches, RPCs or the wire.
"""
