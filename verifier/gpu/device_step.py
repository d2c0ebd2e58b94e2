"""The step of a model whose logits stay on the device, which samples and verifies them.

One small copy brings tokens, counts and flags to the host. Rows of logits follow only for what the
device does not do: sequences with logprobs, which the host verifies by its own sampler, and rows
that are scored.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from tandem.values import TokenLogprob
from verifier.attention.backend import to_device
from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.batch.target_model import BoolArray, FloatArray, StepResult
from verifier.gpu.current_device import current_device
from verifier.gpu.device_model import ForwardOutput, as_floats
from verifier.gpu.sampling.sampler import DeviceSampler
from verifier.gpu.sampling.sequence_slots import SequenceSlots, Staged
from verifier.sampling.rejection_sampler import (
    PADDING,
    JudgedSequence,
    Verdict,
    verify_isolating_faults,
)


class StepSampler:
    """Samples steps, one at a time, on the device. Owned by the engine thread."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self.device_sampler = sampler
        self._slots = SequenceSlots(sampler)

    def begin(
        self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence], output: ForwardOutput
    ) -> "DeviceStep":
        """A step whose forward pass is queued."""
        return DeviceStep(self, layout, sequences, output)

    def queue(
        self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence], output: ForwardOutput
    ) -> Staged:
        """Queues the sampling of a step; waits for nothing. The last step's result must have been
        taken, and grammars are asked for their masks.
        """
        sampler = self.device_sampler
        with torch.inference_mode(), current_device(output.logits.device):
            staged = self._slots.stage(sequences, layout.table_ids[: len(sequences)].tolist())
            sampler.run(output.logits, output.is_bad_row == 0, num_failed=output.is_bad.sum())
        return staged


class DeviceStep:
    """Implements `StepHandle`. The forward pass is queued; `wait` queues the sampling, since the
    masks of grammars are there only then.
    """

    def __init__(
        self,
        sampler: StepSampler,
        layout: BatchLayout,
        sequences: SequenceOf[JudgedSequence],
        output: ForwardOutput,
    ) -> None:
        self._step_sampler = sampler
        self._sampler = sampler.device_sampler
        self._layout = layout
        self._sequences = sequences
        self._output = output

    def wait(self) -> None:
        staged = self._step_sampler.queue(self._layout, self._sequences, self._output)
        # Indices among the sampled sequences.
        self._by_host: IntArray = np.array(staged.by_host, dtype=np.int64)
        self._failures = staged.failures
        self._sampler.wait()

    def result(self) -> StepResult:
        verdict, layout, output = self._sampler.result(), self._layout, self._output
        kv_is_finite = None
        if self._sampler.num_failed:
            kv_is_finite = output.is_bad.cpu().numpy() == 0
        if len(self._by_host):
            verdict = self._with_those_of_the_host(verdict, kv_is_finite)
        hidden_states = None
        if layout.wants_hidden_states:
            hidden_states = self._on_host(output.rows, layout.scored_logits_indices)
        return StepResult(
            verdict=verdict,
            failures=self._failures,
            kv_is_finite=kv_is_finite,
            logits_of=lambda indices: self._on_host(output.logits, indices),
            hidden_states=hidden_states,
        )

    def _with_those_of_the_host(self, verdict: Verdict, kv_is_finite: BoolArray | None) -> Verdict:
        """The verdict with that on the host's sequences in its place."""
        layout, by_host = self._layout, self._by_host
        num_rows = layout.num_sampled_tokens[by_host]
        starts = np.cumsum(layout.num_sampled_tokens)[by_host] - num_rows
        rows = _ranges(starts, num_rows)
        num_drafts = layout.num_draft_tokens[by_host]
        first_drafts = np.cumsum(layout.num_draft_tokens)[by_host] - num_drafts
        found: dict[int, Exception] = {}
        own = verify_isolating_faults(
            self._on_host(self._output.logits, rows),
            [self._sequences[index] for index in by_host.tolist()],
            draft_token_ids=layout.draft_token_ids[_ranges(first_drafts, num_drafts)],
            num_draft_tokens=num_drafts,
            is_usable=None if kv_is_finite is None else kv_is_finite[layout.logits_indices[rows]],
            fail=found.__setitem__,
        )
        self._failures.update({int(by_host[i]): error for i, error in found.items()})
        return _merged(verdict, own, by_host)

    def _on_host(self, tensor: torch.Tensor, indices: IntArray) -> FloatArray:
        """Rows of the tensor [n, ...] float32; waits for the device."""
        with torch.inference_mode():
            return as_floats(tensor[to_device(indices, tensor.device)])


def _ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """The indices [start, start + count) of each, concatenated."""
    ends = np.cumsum(counts)
    indices: IntArray = np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
    return indices


def _merged(verdict: Verdict, other: Verdict, places: IntArray) -> Verdict:
    """The verdict with `other`'s sequences at their places."""
    output_token_ids = verdict.output_token_ids.copy()
    num_accepted_tokens, is_finite = verdict.num_accepted_tokens.copy(), verdict.is_finite.copy()
    output_token_ids[places] = PADDING
    output_token_ids[places, : other.output_token_ids.shape[1]] = other.output_token_ids
    num_accepted_tokens[places] = other.num_accepted_tokens
    is_finite[places] = other.is_finite
    logprobs: dict[int, list[TokenLogprob]] = {
        int(places[i]): each for i, each in other.logprobs.items()
    }
    return Verdict(
        output_token_ids=output_token_ids,
        num_accepted_tokens=num_accepted_tokens,
        is_finite=is_finite,
        logprobs=logprobs,
    )
