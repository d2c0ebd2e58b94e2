"""Drafting from one text: the text, its n-gram index, and the proposal it gives.

Owns what a proposal is (`draft.py`), the index and KMP, which must give the same answers, and the
memory of a text. Does not know whose text it is, nor batches, pools or messages.
"""
