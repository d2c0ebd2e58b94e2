"""What changes a sequence's logits before the temperature: penalties, bias, masked tokens.

In this order: repetition penalty over prompt and output; frequency and presence penalties over
the output; logit bias; stop tokens masked before `min_new_tokens`; tokens that a grammar forbids.

A sequence's tokens are counted once: `Adjustments` is told of new ones. A step's row costs as much
as the sequence has distinct tokens, however long it is.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.sampling.constraint import Constraint
from verifier.sampling.parameters import Sampling

DoubleArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
MaskArray = npt.NDArray[np.int32]
# Logits: float32 from a model, float64 from other callers.
LogitsArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]

_LEAST_CAPACITY = 64


class AdjustmentArrays(NamedTuple):
    """`Adjustments` as kernels take them, for the rows of one step."""

    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    # The first `num_seen`: the distinct tokens of prompt and output, ascending, and how often each
    # is in the output. There is room for one more per row: a kernel adds the draft after it. Empty
    # where no penalty counts them.
    seen_token_ids: IntArray
    counts: IntArray
    num_seen: int
    bias_token_ids: IntArray
    biases: DoubleArray
    stop_token_ids: IntArray
    # How many of the first rows must not give a stop token.
    num_masked: int
    # [rows, ceil(V / 32)]: bit t % 32 of word t // 32 says whether a grammar allows token t. No
    # rows: there is no grammar.
    allowed: MaskArray


class Adjustments:
    """What adjusts the logits of one sequence. Owned by the thread that verifies it.

    Invariant: the first `_num_seen` of `_seen` are distinct, ascending.

    Attributes:
        token_ids: those that were counted last, the caller's own; all tokens, drafts excluded.
        prompt_length, stop_token_ids, constraint: as given.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt_length: int,
        stop_token_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> None:
        """Args:
        prompt_length: the first so many tokens are the prompt; only later ones count as output.
        constraint: the grammar that the output follows; it is told of the tokens elsewhere.
        """
        self.token_ids: SequenceOf[int] = ()
        self.prompt_length = prompt_length
        self.stop_token_ids = stop_token_ids
        self.constraint = constraint
        self._sampling = sampling
        self._num_counted = 0
        self._counts_tokens = sampling.counts_tokens
        self._seen = np.empty(_LEAST_CAPACITY, dtype=np.int64)
        self._counts = np.empty(_LEAST_CAPACITY, dtype=np.int64)
        self._num_seen = 0
        self._bias_token_ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._biases = np.array(list(sampling.logit_bias.values()), dtype=np.float64)
        self._stop_token_ids = np.array(sorted(stop_token_ids), dtype=np.int64)
        # Whether nothing but the grammar changes logits.
        self._only_masks = not (
            self._counts_tokens or sampling.logit_bias or sampling.min_new_tokens
        )

    def count(self, token_ids: SequenceOf[int]) -> None:
        """Counts the sequence's tokens that it has not counted yet.

        Args:
            token_ids: all tokens of the sequence, drafts excluded: those counted before, then
                further ones.
        """
        self.token_ids = token_ids
        start, self._num_counted = self._num_counted, len(token_ids)
        if not self._counts_tokens or start == len(token_ids):
            return
        if start == 0:
            self._count_all(token_ids)
            return
        added = np.array(token_ids[start:], dtype=np.int64)
        room = self._num_seen + len(added) - len(self._seen)
        if room > 0:
            # Twice as much, so that a long output is not copied token by token.
            more = np.empty(room + len(self._seen), dtype=np.int64)
            self._seen = np.concatenate((self._seen, more))
            self._counts = np.concatenate((self._counts, more))
        num_prompt = max(0, min(self.prompt_length - start, len(added)))
        for tokens, weight in ((added[:num_prompt], 0), (added[num_prompt:], 1)):
            self._num_seen = _add_tokens(self._seen, self._counts, self._num_seen, tokens, weight)

    def keep(self, likeliest: SequenceOf[int]) -> bool:
        """True: the adjustments leave these tokens the likeliest, since only a grammar adjusts, and
        it allows them all. False: that is not known, and the rows must be adjusted.

        Args:
            likeliest: the likeliest token of the next row, and of each row after the token before.
        """
        if self.constraint is None or not self._only_masks:
            return False
        return self.constraint.allows(likeliest)

    def for_drafts(self, draft_token_ids: SequenceOf[int]) -> AdjustmentArrays:
        """What adjusts the row that follows all counted tokens, and a row after each draft."""
        sampling, num_seen = self._sampling, self._num_seen
        num_rows = len(draft_token_ids) + 1
        seen = counts = _NO_IDS
        if self._counts_tokens:
            seen, counts = np.empty((2, num_seen + num_rows), dtype=np.int64)
            seen[:num_seen] = self._seen[:num_seen]
            counts[:num_seen] = self._counts[:num_seen]
        return AdjustmentArrays(
            repetition_penalty=float(sampling.repetition_penalty),
            frequency_penalty=float(sampling.frequency_penalty),
            presence_penalty=float(sampling.presence_penalty),
            seen_token_ids=seen,
            counts=counts,
            num_seen=num_seen,
            bias_token_ids=self._bias_token_ids,
            biases=self._biases,
            stop_token_ids=self._stop_token_ids,
            num_masked=sampling.min_new_tokens - (self._num_counted - self.prompt_length),
            allowed=_NO_MASK
            if self.constraint is None
            else self.constraint.allowed(draft_token_ids),
        )

    def _count_all(self, token_ids: SequenceOf[int]) -> None:
        tokens = np.array(token_ids, dtype=np.int64)
        self._seen, places = np.unique(tokens, return_inverse=True)
        self._num_seen = len(self._seen)
        self._counts = np.bincount(places[self.prompt_length :], minlength=self._num_seen)


_NO_IDS, _NO_BIASES = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
_NO_MASK = np.empty((0, 0), dtype=np.int32)
# For a sequence without adjustments.
NO_ADJUSTMENTS = AdjustmentArrays(
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    seen_token_ids=_NO_IDS,
    counts=_NO_IDS,
    num_seen=0,
    bias_token_ids=_NO_IDS,
    biases=_NO_BIASES,
    stop_token_ids=_NO_IDS,
    num_masked=0,
    allowed=_NO_MASK,
)


@kernel
def adjust(
    logits: LogitsArray, index: int, adjusting: AdjustmentArrays, num_seen: int, row: DoubleArray
) -> None:
    """Writes a row's adjusted logits to `row` [V]. Tokens without a logit have no effect: a model
    may name some as end tokens.

    Args:
        logits: [n, V], of the rows of a step; index: which one.
        num_seen: how many tokens there are, drafts before the row included.
    """
    vocab_size = len(row)
    for i in range(vocab_size):
        row[i] = logits[index, i]
    penalty = adjusting.repetition_penalty
    for i in range(num_seen):
        token_id, count = adjusting.seen_token_ids[i], adjusting.counts[i]
        if 0 <= token_id < vocab_size:
            logit = row[token_id]
            if penalty != 1.0:
                logit = logit / penalty if logit > 0 else logit * penalty
            if count > 0:
                logit = logit - adjusting.frequency_penalty * count
                logit = logit - adjusting.presence_penalty
            row[token_id] = logit
    for i in range(len(adjusting.bias_token_ids)):
        token_id = adjusting.bias_token_ids[i]
        if 0 <= token_id < vocab_size:
            row[token_id] += adjusting.biases[i]
    if index < adjusting.num_masked:
        for i in range(len(adjusting.stop_token_ids)):
            token_id = adjusting.stop_token_ids[i]
            if 0 <= token_id < vocab_size:
                row[token_id] = -np.inf
    if len(adjusting.allowed) > 0:
        for token_id in range(vocab_size):
            word = adjusting.allowed[index, token_id >> 5]
            if not (word >> (token_id & 31)) & 1:
                row[token_id] = -np.inf


@kernel
def add_draft(adjusting: AdjustmentArrays, num_seen: int, token_id: int) -> int:
    """Adds the draft after a row as an output token; returns the number of distinct ones."""
    if num_seen == len(adjusting.seen_token_ids):
        return num_seen  # none are counted, or after the last row
    return _add_token(adjusting.seen_token_ids, adjusting.counts, num_seen, token_id, 1)


@kernel
def _add_tokens(
    seen: IntArray, counts: IntArray, num_seen: int, token_ids: IntArray, weight: int
) -> int:
    for token_id in token_ids:
        num_seen = _add_token(seen, counts, num_seen, token_id, weight)
    return num_seen


@kernel
def _add_token(seen: IntArray, counts: IntArray, num_seen: int, token_id: int, weight: int) -> int:
    place, end = 0, num_seen
    while place < end:
        middle = (place + end) // 2
        if seen[middle] < token_id:
            place = middle + 1
        else:
            end = middle
    if place == num_seen or seen[place] != token_id:
        for i in range(num_seen, place, -1):
            seen[i], counts[i] = seen[i - 1], counts[i - 1]
        seen[place], counts[place] = token_id, 0
        num_seen += 1
    counts[place] += weight
    return num_seen
