"""A verifier whose engine can be stalled while its process goes on answering.

    python -m tests.drills.stalling_verifier --stall-file FILE [flags of `python -m verifier`]

While FILE exists, the model's next step does not end.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from servicekit.process import end
from verifier import __main__ as verifier
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import StepHandle, StepResult, TargetModel
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.sampling.rejection_sampler import JudgedSequence

if TYPE_CHECKING:
    # It loads torch, which takes longer than all else that a verifier begins with.
    from verifier.tensor_parallel.leader import Leader

_POLL_INTERVAL_S = 0.01


class StallingModel:
    """Implements `TargetModel` by another one."""

    def __init__(self, model: TargetModel, stall_file: Path) -> None:
        self.vocab_size = model.vocab_size
        self.row_tile = model.row_tile
        self.computes_at_launch = model.computes_at_launch
        self._model = model
        self._stall_file = stall_file

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        return _StallingStep(self._model.launch(layout, sequences), self._stall_file)


class _StallingStep:
    """Implements `StepHandle` by another one."""

    def __init__(self, handle: StepHandle, stall_file: Path) -> None:
        self._handle = handle
        self._stall_file = stall_file

    def wait(self) -> None:
        while self._stall_file.exists():
            time.sleep(_POLL_INTERVAL_S)
        self._handle.wait()

    def result(self) -> StepResult:
        return self._handle.result()


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stall-file", type=Path, required=True)
    arguments, flags = parser.parse_known_args()

    def load(config: VerifierConfig, leader: "Leader | None" = None) -> LoadedModel:
        loaded = load_model(config, leader)
        model = StallingModel(loaded.model, arguments.stall_file)
        return dataclasses.replace(loaded, model=model)

    with (
        mock.patch.object(sys, "argv", [sys.argv[0], *flags]),
        mock.patch("verifier.server.load_model", load),
    ):
        return verifier.main()


if __name__ == "__main__":
    end(main())
