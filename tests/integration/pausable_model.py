"""The real model, held between two steps while a test changes the world around it."""

import threading

import torch

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.target_model import TargetModel


class PausableModel:
    """The real model; a test can hold it between two steps while it changes the world."""

    def __init__(self, model: TargetModel) -> None:
        self.vocab_size = model.vocab_size
        self.may_run = threading.Event()
        self.may_run.set()
        self._model = model

    @property
    def kv_is_finite(self) -> torch.Tensor | None:
        return self._model.kv_is_finite

    def forward(self, layout: BatchLayout) -> torch.Tensor:
        self.may_run.wait()
        return self._model.forward(layout)
