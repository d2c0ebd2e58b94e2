"""Steps of whole texts, chunk by chunk: what the tests of every decoder run. Knows no torch."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TypeVar

from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, StateUse, lay_out

Logits = TypeVar("Logits")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one sequence from position `start` on, with logits at the last `num_rows`."""

    token_ids: list[int]
    start: int
    block_table: list[int]
    num_rows: int = 1
    uses_long_rope: bool = False
    state: StateUse | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def lay_out_chunks(
    chunks: SequenceOf[Chunk], *, block_size: int, is_expanded: bool = False
) -> BatchLayout:
    """One step over all chunks. `is_expanded`: tokens for drafts are entries of one query."""
    scheduled = []
    for chunk in chunks:
        num_new = len(chunk.token_ids) - max(chunk.num_rows, 1) + 1
        whole = ScheduledTokens(
            token_ids=chunk.token_ids[:num_new],
            draft_token_ids=chunk.token_ids[num_new:],
            num_computed_tokens=chunk.start,
            block_table=chunk.block_table[: -(-chunk.end // block_size)],
            is_sampled=chunk.num_rows > 0,
            uses_long_rope=chunk.uses_long_rope,
            state=chunk.state,
        )
        scheduled.append(whole._replace(draft_token_ids=[]) if is_expanded else whole)
        if is_expanded:
            scheduled += [
                whole._replace(
                    token_ids=[token_id], draft_token_ids=[], num_computed_tokens=position
                )
                for position, token_id in enumerate(whole.draft_token_ids, chunk.start + num_new)
            ]
    return lay_out(scheduled, block_size=block_size)


def rows_in_chunks(
    run: Callable[[Chunk], list[Logits]],
    token_ids: list[int],
    sizes: SequenceOf[int],
    block_table: list[int],
) -> list[Logits]:
    """The logits of every token of the text, chunk by chunk.

    Args:
        run: one step over one chunk, which returns its logits.
        sizes: of the chunks, in rotation, from position 0 on.
    """
    rows: list[Logits] = []
    start, turn = 0, 0
    while start < len(token_ids):
        tokens = token_ids[start : start + sizes[turn % len(sizes)]]
        chunk = Chunk(token_ids=tokens, start=start, block_table=block_table, num_rows=len(tokens))
        rows += run(chunk)
        start += len(tokens)
        turn += 1
    return rows
