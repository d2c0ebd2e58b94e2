"""A stand-in for the target model: what it says next is a function of the position alone.

Used where a test needs the target's choices to be known in advance (the golden trace) or its law
to be exact (the sampled law). Everything around it is the real verifier.
"""

import torch

from verifier.batch_layout import BatchLayout


class ScriptedModel:
    """Implements `TargetModel`: greedy at position i (0-based) of the sequence gives script[i]."""

    kv_is_finite: torch.Tensor | None = None

    def __init__(self, script: dict[int, int], *, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._script = script

    def forward(self, layout: BatchLayout) -> torch.Tensor:
        rows = layout.logits_indices[: layout.num_rows]
        logits = torch.zeros(len(rows), self.vocab_size)
        for row, position in enumerate(layout.positions[rows].tolist()):
            logits[row, self._script.get(position + 1, 0)] = 1.0
        return logits


class FixedLawModel:
    """Implements `TargetModel`: the same logits at every position, whatever came before."""

    kv_is_finite: torch.Tensor | None = None

    def __init__(self, logits: torch.Tensor) -> None:
        self.vocab_size = len(logits)
        self._logits = logits

    def forward(self, layout: BatchLayout) -> torch.Tensor:
        return self._logits.expand(layout.num_rows, -1).clone()
