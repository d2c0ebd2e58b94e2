"""How often each slot's sequence has each token: a table on the device, changed by what is new."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]

# What a token adds to its count: one of the output counts; one of the prompt, once, only marks.
_OF_OUTPUT, _OF_PROMPT = 2, 1


class TokenCounts:
    """Owned by the thread that verifies.

    Invariant: a slot's counts, with what is pending, are those of the first `_num_counted` tokens
    of its sequence.

    Attributes:
        table: [num_slots, V] int32: twice the occurrences in the output, and 1 more if the token
            is in the prompt. 0: the sequence does not have the token.
    """

    def __init__(self, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._vocab_size = vocab_size
        # By slot; None: not even the prompt is counted.
        self._num_counted: list[int | None] = [None] * num_slots
        # [2, n] each: places in the flattened table, and what is added there.
        self._pending: list[IntArray] = []

    def count(self, slot: int, token_ids: SequenceOf[int], *, prompt_length: int) -> None:
        """Counts the sequence's tokens that it has not counted yet, at the next `flush`.

        Args:
            token_ids: all tokens of the sequence, drafts excluded: those counted before, then
                further ones.
        """
        num_counted, self._num_counted[slot] = self._num_counted[slot], len(token_ids)
        if num_counted is None:
            num_counted = prompt_length
            self._add(slot, np.unique(_ids(token_ids[:prompt_length])), _OF_PROMPT)
        assert num_counted <= len(token_ids), "tokens were taken back"
        self._add(slot, _ids(token_ids[num_counted:]), _OF_OUTPUT)

    def clear(self, slot: int) -> None:
        """Forgets the slot's sequence."""
        if self._num_counted[slot] is not None:
            self._num_counted[slot] = None
            self.flush()
            self.table[slot].zero_()

    def flush(self) -> None:
        """Queues all that is pending, in one copy; must come before a step's kernels."""
        if not self._pending:
            return
        changes = torch.from_numpy(np.concatenate(self._pending, axis=1))
        self._pending = []
        if self.table.is_cuda:
            changes = changes.pin_memory()
        places, amounts = changes.to(self.table.device, non_blocking=True)
        # Sums of integers: one result in any order.
        self.table.view(-1).scatter_add_(0, places, amounts.to(torch.int32))

    def _add(self, slot: int, token_ids: IntArray, amount: int) -> None:
        token_ids = token_ids[(token_ids >= 0) & (token_ids < self._vocab_size)]
        if len(token_ids):
            places = slot * self._vocab_size + token_ids
            self._pending.append(np.stack((places, np.full_like(places, amount))))


def _ids(token_ids: SequenceOf[int]) -> IntArray:
    return np.array(token_ids, dtype=np.int64)
