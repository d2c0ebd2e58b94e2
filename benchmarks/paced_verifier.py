"""A verifier whose model only waits: all of its processor time is that of serving.

    python -m benchmarks.paced_verifier --model FOLDER [flags of `python -m verifier`]

Every sequence follows `text`, whatever came before; a step takes `STEP_S` and no processor time.
`tandem_step_duration_seconds` has the phases once more, with `_cpu` after the name: the processor
time of the engine's thread; and `model_cpu`, that of the model, which is part of the phase forward.
"""

import dataclasses
import time
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import numpy.typing as npt

from servicekit.process import end
from verifier import __main__ as verifier
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import SampledOnHost
from verifier.batch.target_model import FloatArray
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.engine.observation import PHASES, PhaseClock

if TYPE_CHECKING:
    from verifier.tensor_parallel.leader import Leader

STEP_S = 0.025
CPU = "_cpu"
CPU_PHASES = (*PHASES, "model")
VOCABULARY = 32
MAX_MODEL_LEN = 1 << 16
# Tokens of the text, each as likely as the other.
_TOKENS = (20, 30)


def text(num_tokens: int) -> npt.NDArray[np.int64]:
    """The beginning of the text that every sequence follows, prompt included.

    Every n-gram of it has occurred before, so each step asks for a hint and gets a long one; half
    of the first tokens are right. So a step decides about two tokens with drafts, one without: the
    work for what is decided hardly differs.
    """
    return np.random.default_rng(2026).choice(_TOKENS, MAX_MODEL_LEN + 1)[:num_tokens]


class PacedModel(SampledOnHost):
    """Implements `TargetModel`: one-hot logits by position alone."""

    vocab_size = VOCABULARY
    # Of the last forward pass of any instance.
    last_cpu_s = 0.0

    def __init__(self) -> None:
        self._text = text(MAX_MODEL_LEN + 1)
        self._logits = np.zeros((0, VOCABULARY), dtype=np.float32)

    def forward(self, layout: BatchLayout) -> FloatArray:
        started_at_s = time.thread_time()
        time.sleep(STEP_S)
        if len(self._logits) < layout.num_rows:
            self._logits = np.zeros((2 * layout.num_rows, VOCABULARY), dtype=np.float32)
        logits = self._logits[: layout.num_rows]
        logits[:] = 0.0
        following = self._text[layout.positions[layout.logits_indices] + 1]
        logits[np.arange(layout.num_rows), following] = 1.0
        PacedModel.last_cpu_s = time.thread_time() - started_at_s
        return logits


class CpuPhaseClock(PhaseClock):
    """Adds the processor time of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu_started_at_s = time.thread_time()

    def end(self, phase: str) -> None:
        super().end(phase)
        now_s = time.thread_time()
        self.durations_s[phase + CPU] = now_s - self._cpu_started_at_s
        if phase == "forward":
            self.durations_s["model" + CPU] = PacedModel.last_cpu_s
        self._cpu_started_at_s = now_s


def _load(config: VerifierConfig, leader: "Leader | None" = None) -> LoadedModel:
    served = load_model(config, leader).served
    return LoadedModel(
        model=PacedModel(),
        served=dataclasses.replace(
            served,
            vocab_size=VOCABULARY,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=config.max_num_seqs * MAX_MODEL_LEN // served.block_size,
        ),
    )


def main() -> int:
    with (
        mock.patch("verifier.server.load_model", _load),
        mock.patch("verifier.engine.engine.PhaseClock", CpuPhaseClock),
        mock.patch("verifier.metrics.PHASES", (*PHASES, *(each + CPU for each in CPU_PHASES))),
    ):
        return verifier.main()


if __name__ == "__main__":
    end(main())
