"""The parameters of the open sequences, in tables on the device, one slot each."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from verifier.attention.backend import to_device
from verifier.gpu.sampling.kernels import jit
from verifier.gpu.sampling.token_counts import TokenCounts
from verifier.sampling.logits_processing import distribution_parameters
from verifier.sampling.parameters import Sampling

# As many as a request may have (`sampling.proto`, `verifier.proto`), and the model's end tokens.
MAX_BIASES = 1024
MAX_STOP_TOKENS = 2048


@dataclass(slots=True, kw_only=True)
class _Open:
    sampling: Sampling
    prompt_length: int


class Slots:
    """Owned by the thread that verifies. Nothing here is written while a step's kernels are queued,
    but in the order of the device's stream.

    Attributes:
        integers, numbers: [max_num_seqs + 1, columns of `jit.py`] int64, float64. The last slot is
            that of sequences that could not be staged: they get their likeliest tokens.
        bias_token_ids, biases: [max_num_seqs + 1, MAX_BIASES]. stop_token_ids: likewise; int64.
        counts: of the tokens of sequences with penalties.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        num_slots = max_num_seqs + 1

        def table(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((num_slots, width), dtype=dtype, device=device)

        self.integers = table(jit.NUM_INTEGERS.value, torch.int64)
        self.numbers = table(jit.NUM_NUMBERS.value, torch.float64)
        self.bias_token_ids = table(MAX_BIASES, torch.int64)
        self.biases = table(MAX_BIASES, torch.float64)
        self.stop_token_ids = table(MAX_STOP_TOKENS, torch.int64)
        self.counts = TokenCounts(num_slots=num_slots, vocab_size=vocab_size, device=device)
        self.of_none = max_num_seqs
        self._open: list[_Open | None] = [None] * max_num_seqs
        self._free = list(range(max_num_seqs))[::-1]

    def open(
        self, sampling: Sampling, *, prompt_length: int, stop_token_ids: frozenset[int]
    ) -> int:
        """Returns the slot of a new sequence.

        Raises:
            ValueError: there are too many biases or stop tokens.
            IndexError: all slots are taken.
        """
        if len(sampling.logit_bias) > MAX_BIASES or len(stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(
                f"{len(sampling.logit_bias)} biases and {len(stop_token_ids)} stop tokens, where "
                f"{MAX_BIASES} and {MAX_STOP_TOKENS} fit"
            )
        parameters = distribution_parameters(sampling)
        integers = np.zeros(jit.NUM_INTEGERS.value, dtype=np.int64)
        # No vocabulary is larger than that.
        integers[jit.TOP_K.value] = min(parameters.top_k, 2**31)
        integers[jit.SEED.value] = np.uint64(sampling.seed or 0).astype(np.int64)
        integers[jit.NUM_BIASES.value] = len(sampling.logit_bias)
        integers[jit.NUM_STOPS.value] = len(stop_token_ids)
        integers[jit.COUNTS_TOKENS.value] = sampling.counts_tokens
        numbers = np.zeros(jit.NUM_NUMBERS.value, dtype=np.float64)
        numbers[jit.TEMPERATURE.value] = parameters.temperature
        numbers[jit.LOG_MIN_P.value] = parameters.log_min_p
        numbers[jit.TOP_P.value] = parameters.top_p
        numbers[jit.REPETITION.value] = sampling.repetition_penalty
        numbers[jit.FREQUENCY.value] = sampling.frequency_penalty
        numbers[jit.PRESENCE.value] = sampling.presence_penalty
        bias_token_ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        biases = np.array(list(sampling.logit_bias.values()), dtype=np.float64)
        stops = np.array(sorted(stop_token_ids), dtype=np.int64)
        # Nothing of the sequence can fail any more.
        slot = self._free.pop()
        self._open[slot] = _Open(sampling=sampling, prompt_length=prompt_length)
        for table, values in (
            (self.integers, integers),
            (self.numbers, numbers),
            (self.bias_token_ids, bias_token_ids),
            (self.biases, biases),
            (self.stop_token_ids, stops),
        ):
            if len(values):
                table[slot, : len(values)].copy_(to_device(values, table.device))
        return slot

    def close(self, slot: int) -> None:
        """Frees the slot of a sequence that has ended."""
        assert self._open[slot] is not None, f"slot {slot} is not open"
        self._open[slot] = None
        self.counts.clear(slot)
        self._free.append(slot)

    def take_in(self, slot: int, token_ids: SequenceOf[int]) -> int:
        """Counts the tokens that are new; returns how many further ones must not be a stop token,
        0 or less: none.

        Args:
            token_ids: all of the sequence, drafts excluded.
        """
        opened = self._open[slot]
        assert opened is not None, f"slot {slot} is not open"
        if opened.sampling.counts_tokens:
            self.counts.count(slot, token_ids, prompt_length=opened.prompt_length)
        return opened.sampling.min_new_tokens - (len(token_ids) - opened.prompt_length)
