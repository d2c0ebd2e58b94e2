"""The step of a model whose logits come to the host, where they are sampled.

A model on a CPU computes when its step is waited for, not when it is launched: otherwise the
caller's work between launch and wait would come after the computation, not beside it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol, runtime_checkable

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import (
    BoolArray,
    FloatArray,
    StepHandle,
    StepResult,
)
from verifier.sampling.rejection_sampler import JudgedSequence, verify


@runtime_checkable
class ComputesLogits(Protocol):
    """A model that gives a step's logits to the host."""

    vocab_size: int

    # Whether the K/V of each token of the last layout was finite, [T]. None: the model does not
    # check.
    kv_is_finite: BoolArray | None
    # [S, hidden size], what the logits of the last layout's scored rows were computed from. None:
    # the layout did not want them, or the model does not give hidden states.
    hidden_states: FloatArray | None

    def forward(self, layout: BatchLayout) -> FloatArray:
        """Logits [R, vocab_size] of the layout's rows, in order; valid until the next call.

        Writes K/V of all scheduled tokens, drafts included, and sets the attributes.
        """
        ...


class HostLogits(NamedTuple):
    """What a forward pass gives; what is not explained is as in `StepResult`."""

    logits: FloatArray  # [R, vocab_size]
    kv_is_finite: BoolArray | None  # as in `ComputesLogits`
    hidden_states: FloatArray | None


class SampledOnHost:
    """Completes a `ComputesLogits` to a `TargetModel`."""

    computes_at_launch = False
    kv_is_finite: BoolArray | None = None
    hidden_states: FloatArray | None = None

    def launch(
        self: ComputesLogits, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]
    ) -> StepHandle:
        return HostStep(lambda: _forward(self, layout), layout, sequences)


class HostStep:
    """Implements `StepHandle`."""

    def __init__(
        self,
        compute: Callable[[], HostLogits],
        layout: BatchLayout,
        sequences: SequenceOf[JudgedSequence],
    ) -> None:
        """`compute`: runs the forward pass, or waits for it."""
        self._compute = compute
        self._layout = layout
        self._sequences = sequences

    def wait(self) -> None:
        self._output = self._compute()

    def result(self) -> StepResult:
        layout, (logits, kv_is_finite, hidden_states) = self._layout, self._output
        sequences = self._sequences
        rows = logits[: layout.num_rows - len(layout.scored_only_indices)]
        is_usable = None
        if kv_is_finite is not None and kv_is_finite.all():
            kv_is_finite = None
        if kv_is_finite is not None:
            is_usable = kv_is_finite[layout.logits_indices[: len(rows)]]
        verdict = verify(
            rows,
            sequences,
            draft_token_ids=layout.draft_token_ids,
            num_draft_tokens=layout.num_draft_tokens[: len(sequences)],
            is_usable=is_usable,
        )
        return StepResult(
            verdict=verdict,
            kv_is_finite=kv_is_finite,
            logits_of=lambda indices: logits[indices],
            hidden_states=hidden_states,
        )


def _forward(model: ComputesLogits, layout: BatchLayout) -> HostLogits:
    return HostLogits(model.forward(layout), model.kv_is_finite, model.hidden_states)
