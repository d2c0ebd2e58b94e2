"""The drafters that this verifier talks to: what each was sent, and the stream to it.

`feed.py` makes the batches of one drafter from its `histories.py`, and `drafters.py` has the feeds
of all; they belong to the engine thread, and so does `held.py`: ended texts whose Close is awaited.
`batches.py` says what a message and its answer hold; `wire.py` writes and reads them. `link.py`
moves bytes between them and the drafter, on the event loop. `addresses.py` says which drafters
there may be.
"""
