"""The step of a model whose logits come to the host, where they are sampled.

A model on a CPU computes when its step is waited for, not when it is launched: what the caller does
in between would not run beside it, but after it.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import (
    BoolArray,
    FloatArray,
    StepHandle,
    StepResult,
    StepSampling,
)
from verifier.sampling.rejection_sampler import verify_isolating_faults


@runtime_checkable
class ComputesLogits(Protocol):
    """A model that gives a step's logits to the host."""

    vocab_size: int

    @property
    def kv_is_finite(self) -> BoolArray | None:
        """Whether the K/V of each token of the last layout was finite, [T] bool. None: the
        model does not check.
        """
        ...

    def forward(self, layout: BatchLayout) -> FloatArray:
        """Logits [R, vocab_size] of the layout's rows, in order; valid until the next call.

        Writes K/V of all scheduled tokens, drafts included, and sets `kv_is_finite`.
        """
        ...


@runtime_checkable
class KeepsHiddenStates(Protocol):
    """A `ComputesLogits` that also gives the hidden states that its logits were computed from."""

    # [S, hidden size], by the last layout's `hidden_state_indices`, if it had any.
    hidden_states: FloatArray | None


class HostLogits(NamedTuple):
    """What a forward pass gives; what is not explained is as in `StepResult`."""

    logits: FloatArray  # [R, vocab_size]
    kv_is_finite: BoolArray | None  # as in `ComputesLogits`
    hidden_states: FloatArray | None


class SampledOnHost:
    """Completes a `ComputesLogits` to a `TargetModel`."""

    def launch(self: ComputesLogits, layout: BatchLayout, sampling: StepSampling) -> StepHandle:
        return HostStep(lambda: _forward(self, layout), layout, sampling)


class HostStep:
    """Implements `StepHandle`."""

    def __init__(
        self, compute: Callable[[], HostLogits], layout: BatchLayout, sampling: StepSampling
    ) -> None:
        """`compute`: runs the forward pass, or waits for it."""
        self._compute = compute
        self._layout = layout
        self._sampling = sampling

    def wait(self) -> None:
        self._output = self._compute()

    def result(self) -> StepResult:
        layout, (logits, kv_is_finite, hidden_states) = self._layout, self._output
        sequences = self._sampling.sequences
        rows = logits[: int(layout.num_sampled_tokens.sum())]
        is_usable = None
        if kv_is_finite is not None and kv_is_finite.all():
            kv_is_finite = None
        if kv_is_finite is not None:
            is_usable = kv_is_finite[layout.logits_indices[: len(rows)]]
        failures: dict[int, Exception] = {}
        verdict = verify_isolating_faults(
            rows,
            sequences,
            draft_token_ids=layout.draft_token_ids,
            num_draft_tokens=layout.num_draft_tokens[: len(sequences)],
            is_usable=is_usable,
            rule=self._sampling.rule,
            fail=failures.__setitem__,
        )
        return StepResult(
            verdict=verdict,
            failures=failures,
            kv_is_finite=kv_is_finite,
            logits_of=lambda indices: logits[indices],
            hidden_states=hidden_states,
        )


def _forward(model: ComputesLogits, layout: BatchLayout) -> HostLogits:
    logits = model.forward(layout)
    hidden_states = None
    if len(layout.hidden_state_indices) and isinstance(model, KeepsHiddenStates):
        hidden_states = model.hidden_states
    return HostLogits(logits, model.kv_is_finite, hidden_states)
