"""The protocol of a target model: a step's layout in, logits out."""

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from verifier.batch.batch_layout import BatchLayout

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


class TargetModel(Protocol):
    """Runs one forward pass; owns its K/V cache. Called by the engine thread only."""

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
class HasRowTile(Protocol):
    """A target model whose kernels compute rows in tiles."""

    # The most rows of one.
    row_tile: int


@runtime_checkable
class KeepsHiddenStates(Protocol):
    """A target model that also gives the hidden states that its logits were computed from."""

    # [S, hidden size], by the last layout's `hidden_state_indices`, if it had any.
    hidden_states: FloatArray | None
