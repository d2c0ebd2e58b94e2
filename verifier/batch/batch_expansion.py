"""Batch expansion: verifies drafts without multi-query attention, by K + 1 single-query entries.

Attention is the only part of a forward pass in which a token sees others. So a step is expanded by
splitting the entries that attention gets: a sequence with K drafts becomes K + 1 entries of one
query each over one block table. Entry i computes what follows the sequence and its first i drafts.
It finds the K/V of these drafts because, in every layer, K/V of all tokens is written before any
token attends. (As in vLLM's first scorer.)

Example: "a" is 7 8 9 with drafts 4 5, its 7 8 computed before; "b" is 3, with none.

                    single pass       expanded
    queries         9 4 5 | 3         9 | 4 | 5 | 3
    cu_seqlens_q    0 3 4             0 1 2 3 4
    seq_lens        5 1               3 4 5 1
    block_tables    A B               A A A B

Tokens, positions, slots and logits rows stay in place, so the results are in the order of a single
pass, each sequence's K + 1 rows side by side, and need no contraction.
"""

import dataclasses

import numpy as np

from verifier.batch.batch_layout import BatchLayout


def expand(layout: BatchLayout) -> BatchLayout:
    """The layout for the model: each sequence's `num_expanded_tokens` become entries of their own,
    after one with the sequence's other tokens. The same layout, if no sequence has any.

    The result has E entries: cu_seqlens_q [E + 1], seq_lens [E], block_tables [E],
    table_ids [E]. All else is unchanged.
    """
    num_expanded = layout.num_expanded_tokens
    if not num_expanded.any():
        return layout
    num_together = np.diff(layout.cu_seqlens_q) - num_expanded
    has_others = num_together > 0
    num_entries = num_expanded + has_others
    owners = np.repeat(np.arange(len(num_entries)), num_entries)
    num_queries = np.ones(len(owners), dtype=np.int64)
    first_entries = np.cumsum(num_entries) - num_entries
    num_queries[first_entries[has_others]] = num_together[has_others]
    cu_seqlens_q = np.zeros(len(owners) + 1, dtype=np.int64)
    np.cumsum(num_queries, out=cu_seqlens_q[1:])
    return dataclasses.replace(
        layout,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=layout.positions[cu_seqlens_q[1:] - 1] + 1,
        block_tables=[layout.block_tables[owner] for owner in owners.tolist()],
        table_ids=layout.table_ids[owners],
    )
