"""The step of a model whose logits stay on the device, which samples and verifies them.

One small copy brings tokens, counts and flags to the host. Rows of logits follow only for numbers
that the host computes: logprobs of emitted tokens, and rows that are scored.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from tandem.values import TokenLogprob
from verifier.attention.backend import to_device
from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.batch.target_model import FloatArray, StepResult
from verifier.gpu.current_device import current_device
from verifier.gpu.device_model import ForwardOutput, as_floats
from verifier.gpu.sampling.sampler import DeviceSampler
from verifier.gpu.sampling.sequence_slots import SequenceSlots
from verifier.sampling.rejection_sampler import JudgedSequence, Verdict, emitted_logprobs


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
    ) -> dict[int, Exception]:
        """Queues the sampling of a step; waits for nothing. The last step's result must have been
        taken, and grammars are asked for their masks.

        Returns:
            As `SequenceSlots.stage`.
        """
        sampler = self.device_sampler
        with torch.inference_mode(), current_device(output.logits.device):
            failures = self._slots.stage(sequences, layout.table_ids[: len(sequences)].tolist())
            sampler.run(output.logits, output.is_bad_row == 0, num_failed=output.is_bad.sum())
        return failures


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
        self._failures = self._step_sampler.queue(self._layout, self._sequences, self._output)
        self._sampler.wait()

    def result(self) -> StepResult:
        verdict, layout, output = self._sampler.result(), self._layout, self._output
        kv_is_finite = None
        if self._sampler.num_failed:
            kv_is_finite = output.is_bad.cpu().numpy() == 0
        hidden_states = None
        if layout.wants_hidden_states:
            hidden_states = self._on_host(output.rows, layout.scored_logits_indices)
        return StepResult(
            verdict=self._completed(verdict),
            kv_is_finite=kv_is_finite,
            logits_of=lambda indices: self._on_host(output.logits, indices),
            hidden_states=hidden_states,
        )

    def _completed(self, verdict: Verdict) -> Verdict:
        """With the failures, and the logprobs of emitted tokens, computed on the host."""
        num_rows = self._layout.num_sampled_tokens[: len(self._sequences)]
        first_rows = np.cumsum(num_rows) - num_rows
        num_emitted = verdict.num_accepted_tokens + verdict.is_finite
        wanted = [
            index
            for index, sequence in enumerate(self._sequences)
            if sequence.sampling.logprobs is not None
            and num_emitted[index]
            and index not in self._failures
        ]
        if not wanted:
            return dataclasses.replace(verdict, failures=self._failures)
        indices = [np.arange(num_emitted[index]) + first_rows[index] for index in wanted]
        rows = self._on_host(self._output.logits, np.concatenate(indices))
        logprobs: dict[int, list[TokenLogprob]] = {}
        start = 0
        for index in wanted:
            emitted = verdict.output_token_ids[index, : num_emitted[index]]
            end = start + len(emitted)
            try:
                sequence = self._sequences[index]
                logprobs[index] = emitted_logprobs(rows[start:end], sequence, emitted)
            except Exception as error:
                self._failures[index] = error
            start = end
        return dataclasses.replace(verdict, logprobs=logprobs, failures=self._failures)

    def _on_host(self, tensor: torch.Tensor, indices: IntArray) -> FloatArray:
        """Rows of the tensor [n, ...] float32; waits for the device."""
        with torch.inference_mode():
            return as_floats(tensor[to_device(indices, tensor.device)])
