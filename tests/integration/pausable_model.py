"""The real model, which a test can pause and slow down between two steps."""

import dataclasses
import threading
import time
from collections.abc import Sequence as SequenceOf

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import StepHandle, StepResult, TargetModel
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.sampling.rejection_sampler import JudgedSequence


class PausableModel:
    """A `TargetModel` whose forward pass waits while `may_run` is cleared.

    Attributes:
        pause_s: before each forward pass.
    """

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
        self.computes_at_launch = model.computes_at_launch
        self.may_run = threading.Event()
        self.may_run.set()
        self.pause_s = 0.0
        self._model = model

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        return _PausedStep(self, self._model.launch(layout, sequences))


class _PausedStep:
    def __init__(self, model: PausableModel, handle: StepHandle) -> None:
        self._model = model
        self._handle = handle

    def wait(self) -> None:
        self._model.may_run.wait()
        time.sleep(self._model.pause_s)
        self._handle.wait()

    def result(self) -> StepResult:
        return self._handle.result()


class PausableLoad:
    """Loads a verifier's model.

    Attributes:
        model: once it is loaded.
    """

    model: PausableModel

    def __call__(self, config: VerifierConfig) -> LoadedModel:
        loaded = load_model(config)
        self.model = PausableModel(loaded.model)
        return dataclasses.replace(loaded, model=self.model)
