"""One batch of deltas on its way to its proposals: append, answer, write.

Owns the wire format, the order of work within a batch and between streams, and the background
indexer. Does not know RPCs (`drafter.service`), nor how a draft is found (`drafter.ngram`,
`drafter.pool_index`).
"""
