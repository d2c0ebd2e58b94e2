"""A verifier whose engine can be stalled while its process goes on answering.

    python -m benchmarks.drills.stalling_verifier --stall-file FILE [flags of `python -m verifier`]

While FILE exists, the model's next forward pass does not begin.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from unittest import mock

from verifier import __main__ as verifier
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import BoolArray, FloatArray, TargetModel
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.tensor_parallel.leader import Leader

_POLL_INTERVAL_S = 0.01


class StallingModel:
    """Implements `TargetModel` by another one."""

    def __init__(self, model: TargetModel, stall_file: Path) -> None:
        self.vocab_size = model.vocab_size
        self._model = model
        self._stall_file = stall_file

    @property
    def kv_is_finite(self) -> BoolArray | None:
        return self._model.kv_is_finite

    def forward(self, layout: BatchLayout) -> FloatArray:
        while self._stall_file.exists():
            time.sleep(_POLL_INTERVAL_S)
        return self._model.forward(layout)


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stall-file", type=Path, required=True)
    arguments, flags = parser.parse_known_args()

    def load(config: VerifierConfig, leader: Leader | None = None) -> LoadedModel:
        loaded = load_model(config, leader)
        model = StallingModel(loaded.model, arguments.stall_file)
        return dataclasses.replace(loaded, model=model)

    with (
        mock.patch.object(sys, "argv", [sys.argv[0], *flags]),
        mock.patch("verifier.server.load_model", load),
    ):
        return verifier.main()


if __name__ == "__main__":
    sys.exit(main())
