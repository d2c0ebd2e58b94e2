"""The drafter: keeps each sequence's token history and proposes what followed it before.

Started by `python -m drafter`. Read `service.py` for the RPCs, `history_store.py` for the state,
`draft_kernel.py` for the law of a proposal and `ngram_index.py` for how it is found.
"""
