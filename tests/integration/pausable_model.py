"""The real model, which a test can pause and slow down between two steps."""

import dataclasses
import threading
import time

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import BoolArray, FloatArray, TargetModel
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig


class PausableModel:
    """A `TargetModel` whose forward pass waits while `may_run` is cleared.

    Attributes:
        pause_s: before each forward pass.
    """

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
        self.may_run = threading.Event()
        self.may_run.set()
        self.pause_s = 0.0
        self._model = model

    @property
    def kv_is_finite(self) -> BoolArray | None:
        return self._model.kv_is_finite

    def forward(self, layout: BatchLayout) -> FloatArray:
        self.may_run.wait()
        time.sleep(self.pause_s)
        return self._model.forward(layout)


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
