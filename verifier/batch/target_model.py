"""The protocol of a target model: a step's layout and sampling in, its verdict out.

A step is launched, and its result is waited for later: a device computes meanwhile, and the caller
does what needs no result. `host_step.py` is the step of a model whose logits come to the host.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.sampling.rejection_sampler import JudgedSequence, Verdict

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


# One is made in every step: a frozen dataclass takes three times as long.
class StepResult(NamedTuple):
    """What a step has computed. All but the verdict is valid until the next launch."""

    # Which drafts of the sampled sequences are accepted, and what follows them.
    verdict: Verdict
    # [T], whether the K/V of each token of the layout is finite. None: all is, or the model does
    # not check.
    kv_is_finite: BoolArray | None
    # Logits [n, vocab_size] of n of the R rows, by their indices.
    logits_of: Callable[[IntArray], FloatArray]
    # [S, hidden size], what the logits of the layout's scored rows were computed from. None: the
    # layout does not want them, or the model does not give hidden states.
    hidden_states: FloatArray | None


class StepHandle(Protocol):
    """A step under way. First `wait` is called, then `result`, each once.

    With a model that computes at launch, the masks of a step's grammars are there when `wait` is
    called, and not before. With any other model, what asks for masks computes them.
    """

    def wait(self) -> None:
        """Returns when the forward pass is over. A host computes it here. An exception leaves the
        K/V undefined.
        """
        ...

    def result(self) -> StepResult:
        """The step's result. What one sequence raises is among the verdict's failures."""
        ...


class TargetModel(Protocol):
    """Runs steps, one at a time; owns its K/V cache. Called by the engine thread only."""

    vocab_size: int
    # Whether a step is computed from its launch on, beside the caller; False: when it is waited
    # for.
    computes_at_launch: bool

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        """Begins a step, which writes K/V of all scheduled tokens, drafts included. Asks no grammar
        for masks: the caller has messages to send first.

        Args:
            sequences: those that are sampled, with `num_sampled_tokens` in the layout; the first
                ones of the batch, in its order.

        Must not change the layout, and may read it until the step's result is there.
        """
        ...
