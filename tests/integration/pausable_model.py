"""The real model, which a test can pause between two steps."""

import threading

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import BoolArray, FloatArray, TargetModel


class PausableModel:
    """A `TargetModel` whose forward pass waits while `may_run` is cleared."""

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
        self.may_run = threading.Event()
        self.may_run.set()
        self._model = model

    @property
    def kv_is_finite(self) -> BoolArray | None:
        return self._model.kv_is_finite

    def forward(self, layout: BatchLayout) -> FloatArray:
        self.may_run.wait()
        return self._model.forward(layout)
