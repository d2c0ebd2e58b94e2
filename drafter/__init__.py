"""The drafter: stores each sequence's token history and drafts what followed it before.

Started by `python -m drafter`. Read `service.py` for the RPCs, then `batch/engine.py` for the steps
of one batch. The rooms, each of which knows only those below it:

- `batch/`: one batch of deltas from bytes to bytes: scan, append, answer, write.
- `history/`: what is known of each sequence, and for how long.
- `pools/`: which texts the shared pools store, and their snapshots.
- `pool_index/`: the memory of the pools, and drafts from them.
- `ngram/`: one text, its index, and the rules of a draft.
"""
