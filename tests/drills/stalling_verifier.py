"""A verifier whose engine can be stalled while its process goes on answering.

    python -m tests.drills.stalling_verifier --stall-file FILE [flags of `python -m verifier`]

While FILE exists, the model's next step does not end.
"""

import argparse
import dataclasses
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from servicekit.serving.process import end
from tests.integration.pausable_model import PausableModel
from verifier import __main__ as verifier
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig

if TYPE_CHECKING:
    # It loads torch, which takes longer than all else that a verifier begins with.
    from verifier.tensor_parallel.leader import Leader

_POLL_INTERVAL_S = 0.01


class _Absence(threading.Event):
    """Is set while a file is not there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is None
        while self._file.exists():
            time.sleep(_POLL_INTERVAL_S)
        return True


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stall-file", type=Path, required=True)
    arguments, flags = parser.parse_known_args()

    def load(config: VerifierConfig, leader: "Leader | None" = None) -> LoadedModel:
        loaded = load_model(config, leader)
        model = PausableModel(loaded.model)
        model.may_run = _Absence(arguments.stall_file)
        return dataclasses.replace(loaded, model=model)

    with (
        mock.patch.object(sys, "argv", [sys.argv[0], *flags]),
        mock.patch("verifier.server.load_model", load),
    ):
        return verifier.main()


if __name__ == "__main__":
    end(main())
