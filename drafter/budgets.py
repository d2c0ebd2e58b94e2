"""How much the drafter does at one go, so that its event loop answers others in between.

Every budget stands here. Times are those of a processor of a few GHz.
"""

SLICE_S = 0.001
"""How long one batch may keep the event loop before others get a turn."""

ROWS_PER_CALL = 512
"""Rows that one kernel call answers: up to half a millisecond."""

NGRAMS_PER_ANSWER = 8_192
"""N-grams that one call enters for rows that are waited for: about 0.3 ms."""

FORGOTTEN_AT_ONCE = 64
"""Expired sequences that are forgotten at one go: a few hundred microseconds."""

MAX_LIVE_TOKENS = 256
"""A delta with more tokens makes its batch bulk. A step brings a sequence some dozen tokens; more
is a prompt, or a replayed history."""

# When texts are indexed.

MAX_UNINDEXED = 192
"""Longest unindexed tail tolerated per proposal; it is scanned linearly."""

MIN_UNINDEXED = 32
"""A shorter tail stays unindexed after an answer: to index the tokens of several steps together
costs little more than to index those of one. So far below `MAX_UNINDEXED` that the next steps'
tokens fit too."""

MAX_SHORT_TAIL = 256
"""Longest unindexed tail that the indexer indexes between any two turns of the event loop; texts
with longer ones come after all others."""

MAX_AWAITED_NGRAMS = 16_384
"""A text with more unindexed n-grams is not waited for: its proposal says that it is still being
indexed. So many take about half a millisecond."""

# One step of the background indexer.

NGRAMS_PER_STEP = 1_024
"""Of short tails: a batch that comes meanwhile waits for some 50 us, at each of the event loop's
turns on its way."""

NGRAMS_PER_LONG_STEP = 8_192
"""Of one long tail, after which the event loop is left alone for a while."""

GROWTH_S = 0.0001
"""How long a step grows tables."""

# How long text gives way to live batches, see `time_slices.py`.

COOL_DOWN_S = 0.001
"""How long bulk leaves the event loop alone after a slice: half of its time, and no gateway's
replay comes anywhere near its deadline."""

LIVE_FOR_S = 0.1
"""Traffic is live if there was a live batch within this time: some steps of a verifier."""

# Work on pools, see `drafter.pools`.

POOL_SLICE_S = 0.0003
"""How long it keeps the event loop before others get a turn."""

POOL_NGRAMS_PER_PIECE = 256
POOL_TOKENS_PER_PIECE = 960
"""The most of one piece of work: each takes about a hundred microseconds."""

SNAPSHOT_SLICE_S = 0.0005
"""How long copying texts for a snapshot keeps the event loop before others get a turn."""

SWEEP_INTERVAL_S = 1.0
"""How often expired sequences are looked for when no request does it."""
