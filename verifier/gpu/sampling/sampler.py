"""The sampler on the device of the logits: the verdict of `verifier/sampling/`, by Triton kernels.

A step's logits stay where they are; tokens, counts and flags are copied to the host, once. The
steps are those of the host, in float64 with the host's bits of noise: adjust, weigh, cut, choose
(`rows.py`, `cut.py`, `choice.py`). Sums are added up in another order, and the logarithm is another
one, so tokens differ from the host's only where two candidates are within rounding.

A step queues the same kernels whatever lies on the device, and allocates nothing.

Shape legend as in `rejection_sampler.py`; N blocks of a row.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from verifier.gpu.sampling.kernels import choice, cut, jit, rows
from verifier.gpu.sampling.slots import MAX_BIASES, MAX_STOP_TOKENS, Slots
from verifier.sampling.parameters import Sampling
from verifier.sampling.rejection_sampler import Verdict

MaskArray = npt.NDArray[np.int32]

_BLOCK, _CUT_BLOCK = 2048, 8192
# So many rows are computed at a time: memory does not grow with a step's rows.
_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSequence:
    """What a sequence's rows are verified with in one step."""

    # None: it could not be staged, and the verdict on it has no meaning.
    slot: int | None
    # All tokens of the sequence, drafts excluded.
    token_ids: SequenceOf[int]
    draft_token_ids: SequenceOf[int]
    # Absolute position of the token that its first row samples.
    first_position: int
    # [K_i + 1, ceil(V / 32)], as `Constraint.allowed` has it; None: there is no grammar.
    allowed: MaskArray | None = None


class DeviceSampler:
    """Owned by the thread that verifies. `open` a slot for each sequence; then for each step
    `stage`, `run`, `result`; `close` the slot. A GPU must be the thread's current device.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        vocab_size: int,
        max_num_seqs: int,
        max_num_drafts: int,
        max_num_rows: int | None = None,
    ) -> None:
        """Allocates, in bytes: 4 V (max_num_seqs + 1) for counts, V / 8 for each row's mask, and
        16 V for each of at most 64 rows.

        Args:
            max_num_drafts: of one sequence.
            max_num_rows: of one step; None: those of as many sequences with as many drafts.
        """
        self._device = device
        self._vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self._max_num_drafts = max_num_drafts
        self._max_num_rows = max_num_rows or max_num_seqs * (max_num_drafts + 1)
        self._slots = Slots(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device)
        self._num_blocks = triton.cdiv(vocab_size, _BLOCK)
        self._chunk_rows = min(self._max_num_rows, _CHUNK_ROWS)
        # The staged step: the drafts of each sequence, and all rows.
        self._num_drafts: list[int] = []
        self._num_rows = 0

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_rows, num_blocks = self._max_num_rows, self._num_blocks
        step_width = jit.DRAFTS.value + max_num_drafts
        self._steps = _Copied((max_num_seqs, step_width), torch.int64, device)
        self._row_sequences = _Copied((num_rows,), torch.int64, device)
        self._masks = _Copied((num_rows, (vocab_size + 31) // 32), torch.int32, device)
        # The first row begins with the number of tokens that failed; verdicts follow.
        self._verdicts = _Copied((1 + max_num_seqs, max_num_drafts + 3), torch.int64, device)
        self._all_usable = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._raw_tops = zeros(num_rows, num_blocks, dtype=torch.float64)
        self._tops = zeros(num_rows, num_blocks, dtype=torch.float64)
        self._top_token_ids = zeros(num_rows, num_blocks, dtype=torch.int32)
        self._sums = zeros(num_rows, num_blocks, dtype=torch.float64)
        self._scores = zeros(num_rows, num_blocks, dtype=torch.float64)
        self._chosen = zeros(num_rows, num_blocks, dtype=torch.int32)
        self._scaled = zeros(self._chunk_rows, vocab_size, dtype=torch.float64)
        self._weights = zeros(self._chunk_rows, vocab_size, dtype=torch.float64)
        self._is_copied = torch.cuda.Event() if device.type == "cuda" else None

    def open(
        self,
        sampling: Sampling,
        *,
        prompt_length: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> int:
        """Returns the slot of a new sequence.

        Raises:
            ValueError: there are too many biases or stop tokens.
            IndexError: `max_num_seqs` are open.
        """
        return self._slots.open(
            sampling, prompt_length=prompt_length, stop_token_ids=stop_token_ids
        )

    def close(self, slot: int) -> None:
        """Frees the slot of a sequence that has ended."""
        self._slots.close(slot)

    def stage(self, sequences: SequenceOf[StagedSequence]) -> None:
        """Copies to the device what the next `run` needs beside logits. The last step's `result`
        must have been taken: its memory is used again.
        """
        self._num_drafts = [len(sequence.draft_token_ids) for sequence in sequences]
        self._num_rows = sum(self._num_drafts) + len(sequences)
        assert len(sequences) <= self.max_num_seqs, f"{len(sequences)} sequences"
        assert max(self._num_drafts, default=0) <= self._max_num_drafts, f"{self._num_drafts}"
        assert self._num_rows <= self._max_num_rows, f"{self._num_rows} rows"
        steps, masks = self._steps.host, self._masks.host
        first_row = num_masks = 0
        for index, sequence in enumerate(sequences):
            slot, num_masked = self._slots.of_none, 0
            if sequence.slot is not None:
                slot = sequence.slot
                num_masked = self._slots.take_in(slot, sequence.token_ids)
            step, end = steps[index], first_row + len(sequence.draft_token_ids) + 1
            step[jit.SLOT.value] = slot
            step[jit.FIRST_ROW.value] = first_row
            step[jit.NUM_DRAFTS.value] = len(sequence.draft_token_ids)
            step[jit.POSITION.value] = sequence.first_position
            step[jit.NUM_MASKED.value] = num_masked
            step[jit.MASK_ROW.value] = -1
            step[jit.DRAFTS.value : jit.DRAFTS.value + end - first_row - 1] = np.array(
                sequence.draft_token_ids, dtype=np.int64
            )
            if sequence.allowed is not None:
                step[jit.MASK_ROW.value] = num_masks
                masks[num_masks : num_masks + end - first_row] = sequence.allowed
                num_masks += end - first_row
            self._row_sequences.host[first_row:end] = index
            first_row = end
        self._slots.counts.flush()
        self._steps.to_device(len(sequences))
        self._row_sequences.to_device(self._num_rows)
        self._masks.to_device(num_masks)

    def run(
        self,
        logits: torch.Tensor,
        is_usable: torch.Tensor | None = None,
        num_failed: torch.Tensor | None = None,
    ) -> None:
        """Queues the staged step, and the copy of its verdicts to the host. Waits for nothing.

        Args:
            logits: [R or more, V] float32, bfloat16 or float16, on the device; rows contiguous.
            is_usable: [R or more] bool, on the device; False: the row must not be used. None: all
                may be.
            num_failed: scalar int64 on the device, which comes in the same copy; see `num_failed`.
        """
        num_rows, num_sequences = self._num_rows, len(self._num_drafts)
        assert logits.shape[0] >= num_rows, f"{logits.shape} for {num_rows} rows"
        assert logits.shape[1] == self._vocab_size, f"{logits.shape}"
        assert logits.stride(1) == 1, f"{logits.stride()}"
        usable = self._all_usable if is_usable is None else is_usable
        for first_row in range(0, num_rows, self._chunk_rows):
            self._compute_rows(logits, first_row, min(self._chunk_rows, num_rows - first_row))
        # Of each sequence: accepted drafts and one more token, then -1; how many are accepted;
        # whether the row after them is usable.
        verdicts = self._verdicts.device[1 : 1 + num_sequences]
        if num_sequences:
            choice.decide[(num_sequences,)](
                self._steps.device,
                self._slots.numbers,
                usable.view(torch.int8),
                self._raw_tops,
                self._tops,
                self._top_token_ids,
                self._scores,
                self._chosen,
                verdicts,
                STEP_WIDTH=self._steps.device.shape[1],
                VERDICT_WIDTH=verdicts.shape[1],
                PADDED_WIDTH=triton.next_power_of_2(verdicts.shape[1]),
                NUM_BLOCKS=self._num_blocks,
                PADDED=triton.next_power_of_2(self._num_blocks),
                **jit.NO_FUSION,
            )
        if num_failed is not None:
            self._verdicts.device[0, 0].copy_(num_failed)
        self._verdicts.to_host(1 + num_sequences)
        if self._is_copied is not None:
            self._is_copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Returns when the step that was run last is over, and its verdicts are on the host."""
        if self._is_copied is not None:
            self._is_copied.synchronize()

    @property
    def num_failed(self) -> int:
        """What `run` was given with the last step; after `wait`."""
        return int(self._verdicts.host[0, 0])

    def result(self) -> Verdict:
        """Waits for the step that was run last."""
        self.wait()
        verdicts = self._verdicts.host[1 : 1 + len(self._num_drafts)].copy()
        return Verdict(
            output_token_ids=verdicts[:, : max(self._num_drafts, default=0) + 1],
            num_accepted_tokens=verdicts[:, -2],
            is_finite=verdicts[:, -1] != 0,
            logprobs={},
            failures={},
        )

    def _compute_rows(self, logits: torch.Tensor, first_row: int, num_rows: int) -> None:
        """Leaves each row's tokens by block in `_top_token_ids` and `_chosen`."""
        slots, steps, row_sequences = self._slots, self._steps.device, self._row_sequences.device
        of_step = (first_row, row_sequences, steps)
        sizes = {
            "VOCAB_SIZE": self._vocab_size,
            "STEP_WIDTH": steps.shape[1],
            "NUM_BLOCKS": self._num_blocks,
            **jit.NO_FUSION,
        }
        padded = {**sizes, "PADDED": triton.next_power_of_2(self._num_blocks)}
        grid = (num_rows, self._num_blocks)
        rows.adjust_rows[grid](
            logits,
            logits.stride(0),
            *of_step,
            slots.integers,
            slots.numbers,
            slots.counts.table,
            slots.bias_token_ids,
            slots.biases,
            slots.stop_token_ids,
            self._masks.device,
            self._raw_tops,
            self._tops,
            self._top_token_ids,
            self._scaled,
            MAX_BIASES=MAX_BIASES,
            MAX_STOPS=MAX_STOP_TOKENS,
            BLOCK=_BLOCK,
            num_warps=8,
            **sizes,
        )
        rows.weigh_rows[grid](
            *of_step,
            slots.numbers,
            self._tops,
            self._scaled,
            self._weights,
            self._sums,
            BLOCK=_BLOCK,
            num_warps=8,
            **padded,
        )
        cut.cut_rows[(num_rows,)](
            *of_step,
            slots.integers,
            slots.numbers,
            self._tops,
            self._scaled,
            self._weights,
            self._sums,
            BLOCK=_CUT_BLOCK,
            num_warps=16,
            **padded,
        )
        choice.race_rows[grid](
            *of_step,
            slots.integers,
            slots.numbers,
            self._tops,
            self._weights,
            self._sums,
            self._scores,
            self._chosen,
            BLOCK=_BLOCK,
            num_warps=8,
            **padded,
        )


class _Copied:
    """Memory on the device, and pinned memory of the host of the same shape.

    Attributes:
        host: numpy, of the same memory as the pinned tensor.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: npt.NDArray[np.int64] = self._pinned.numpy()

    def to_device(self, count: int) -> None:
        """Queues the copy of the first `count` rows."""
        self.device[:count].copy_(self._pinned[:count], non_blocking=True)

    def to_host(self, count: int) -> None:
        self._pinned[:count].copy_(self.device[:count], non_blocking=True)
