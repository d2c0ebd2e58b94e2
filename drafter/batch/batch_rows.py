"""One batch on its way to its answer: a row per delta, in order.

Owned by the request that it belongs to. Does not know how answers are found (`drafting.py`), nor
how they look on the wire (`answer_wire.py`, `wire.py`).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from drafter.batch.scan import (
    APPENDED,
    DRAFT,
    INDEXING,
    NO_MATCH,
    OPEN,
    POOL_DRAFT,
    REFUSED,
)
from drafter.history.history import History
from drafter.history.messages import Proposal, ProposalStatus, Source

_WITHOUT_DRAFT = {
    APPENDED: ProposalStatus.OK,
    NO_MATCH: ProposalStatus.NO_MATCH,
    INDEXING: ProposalStatus.INDEXING,
}


class BatchRows:
    """What is asked of each sequence, and what became of it.

    Attributes:
        histories: the sequences' histories, held for as long as kernels may look at them; None: the
            row needs no work.
        headers: their addresses, int64; only as true as the histories' were when they were taken.
        wanted: most tokens of each draft, int64; 0 if there is no room for one.
        is_wanted: whether a draft was asked for.
        outcomes: what became of each row, see `batch_wire.OPEN`.
        lengths: the known tokens that the draft continues, int64.
        reaches, draft_starts, draft_lengths: of the drafts, int64.
        drafts: where they are, uint32.
        refusals: the answers of rows that were refused.
    """

    def __init__(self, num_rows: int) -> None:
        numbers = np.zeros((7, num_rows), dtype=np.int64)
        self.headers, self.wanted, self.outcomes, self.lengths = numbers[:4]
        self.reaches, self.draft_starts, self.draft_lengths = numbers[4:]
        self.is_wanted = np.zeros(num_rows, dtype=np.bool_)
        self.drafts = np.empty(0, dtype=np.uint32)
        self.histories: list[History | None] = [None] * num_rows
        self.refusals: dict[int, Proposal] = {}

    def ask(self, i: int, history: History, most_tokens: int, *, is_wanted: bool) -> None:
        """Makes a row wait for its answer."""
        self.histories[i] = history
        self.headers[i] = history.address
        self.wanted[i] = most_tokens
        self.is_wanted[i] = is_wanted

    def answer_empty(self, i: int, history: History, *, is_wanted: bool) -> None:
        """Answers a row at once, without a draft: its text is still to be indexed."""
        self.lengths[i] = history.length
        self.outcomes[i] = INDEXING if is_wanted else APPENDED

    def refuse(self, i: int, refusal: Proposal) -> None:
        """Answers a row whose delta was not taken."""
        self.histories[i] = None
        self.outcomes[i] = REFUSED
        self.refusals[i] = refusal

    def refresh(self, rows: npt.NDArray[np.int64] | None = None) -> None:
        """Takes the headers' addresses anew, when others may have made histories grow."""
        for i in range(len(self.headers)) if rows is None else rows.tolist():
            history = self.histories[i]
            if history is not None:
                self.headers[i] = history.address

    def make_room(self) -> None:
        """Makes room for the drafts."""
        ends = np.cumsum(self.wanted)
        self.draft_starts[:] = ends - self.wanted
        self.drafts = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.uint32)

    def proposals(self, sequence_ids: Sequence[str]) -> Iterator[Proposal]:
        """The answers, one per row, once none is open."""
        for i, (sequence_id, outcome) in enumerate(
            zip(sequence_ids, self.outcomes.tolist(), strict=True)
        ):
            assert outcome != OPEN, "every row is answered"
            if outcome == REFUSED:
                yield self.refusals[i]
                continue
            base_length = int(self.lengths[i])
            if outcome in (DRAFT, POOL_DRAFT):
                start = int(self.draft_starts[i])
                yield Proposal(
                    sequence_id=sequence_id,
                    status=ProposalStatus.OK,
                    base_length=base_length,
                    token_ids=self.drafts[start : start + int(self.draft_lengths[i])].tolist(),
                    matched_ngram_length=int(self.reaches[i]),
                    source=Source.POOL if outcome == POOL_DRAFT else Source.SEQUENCE,
                )
            else:
                status = _WITHOUT_DRAFT[outcome]
                yield Proposal(sequence_id=sequence_id, status=status, base_length=base_length)
