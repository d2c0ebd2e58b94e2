"""Recorded texts said by a model: forced on the device where that samples, so that its sampler is
measured, too.
"""

import copy
from collections.abc import Sequence
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.forced_texts import SURE, ForcedTexts, RecordedTexts
from benchmarks.gpu.texts import Text
from verifier.attention.backend import to_device
from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import ComputesLogits
from verifier.batch.target_model import StepHandle, TargetModel
from verifier.gpu.decoder import GpuDecoder
from verifier.gpu.device_model import ForwardOutput
from verifier.sampling.rejection_sampler import JudgedSequence

if TYPE_CHECKING:
    # Imports Triton, which a CPU needs not have.
    from verifier.gpu.device_step import StepSampler


def saying(model: TargetModel, texts: Sequence[Text]) -> TargetModel:
    """A model that computes all that this one does, with its weights and K/V, and says the texts.

    Where the host samples, the logits are forced there.
    """
    if isinstance(model, GpuDecoder) and model.sampler is not None:
        forced: Any = copy.copy(model)
        forced.sampler = ForcedSampler(model.sampler, texts)
        said: TargetModel = forced
        return said
    assert isinstance(model, ComputesLogits)
    return ForcedTexts(model, texts)


class ForcedSampler:
    """Stands before a decoder's sampler: makes the logits of each text's next token the largest,
    on the device and without waiting for it.
    """

    def __init__(self, sampler: "StepSampler", texts: Sequence[Text]) -> None:
        self._sampler = sampler
        self._texts = RecordedTexts(texts)

    def begin(
        self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence], output: ForwardOutput
    ) -> StepHandle:
        logits = output.logits
        sure = min(SURE, torch.finfo(logits.dtype).max)
        with torch.inference_mode():
            token_ids = to_device(self._texts.next_token_ids(layout), logits.device)
            logits.scatter_(1, token_ids[:, None], sure)
        return self._sampler.begin(layout, sequences, output)
