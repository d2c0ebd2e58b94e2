"""Drafting from one text: the text, its n-gram index, and the draft that it gives.

Owns the rules of a draft (`draft.py`), the index and KMP, which give the same drafts, and the
memory of a text. Does not know whose text it is, nor batches, pools or messages.
"""
