"""What models on a device have in common: logits computed there and fetched to the host.

On a GPU a step's kernels are queued when it is launched; on a CPU it is computed when it is waited
for (`verifier/batch/host_step.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from verifier.batch.batch_layout import BatchLayout
from verifier.batch.host_step import HostLogits, HostStep, SampledOnHost
from verifier.batch.target_model import FloatArray, StepHandle
from verifier.sampling.rejection_sampler import JudgedSequence


class ForwardOutput(NamedTuple):
    """What a forward pass leaves on the device, until the next one."""

    rows: torch.Tensor  # [R, H], what logits are computed from
    logits: torch.Tensor  # [R, V], of the model's dtype
    is_bad: torch.Tensor  # [T] int32, 1 where K or V is not finite
    is_bad_row: torch.Tensor  # [R], of the rows' tokens


class DeviceModel(SampledOnHost, ABC):
    """Implements `TargetModel` and `ComputesLogits`, but for `forward_on_device`, which sets
    `hidden_states`. Owned by the engine thread.

    Attributes:
        computes_at_launch: whether a step's kernels are queued when it is launched.
    """

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.computes_at_launch = device.type != "cpu"

    def launch(self, layout: BatchLayout, sequences: SequenceOf[JudgedSequence]) -> StepHandle:
        if not self.computes_at_launch:
            return super().launch(layout, sequences)
        computed = self.forward_on_device(layout)
        return HostStep(lambda: self._fetch(*computed), layout, sequences)

    def forward(self, layout: BatchLayout) -> FloatArray:
        """See `ComputesLogits`."""
        output = self._fetch(*self.forward_on_device(layout))
        self.kv_is_finite = output.kv_is_finite
        return output.logits

    @abstractmethod
    def forward_on_device(self, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """A forward pass; leaves on the device: logits [R, V] in the model's dtype, and whether K/V
        is finite, [T].
        """

    def _fetch(self, logits: torch.Tensor, kv_is_finite: torch.Tensor) -> HostLogits:
        """Waits for the device."""
        return HostLogits(as_floats(logits), kv_is_finite.cpu().numpy(), self.hidden_states)


def as_floats(tensor: torch.Tensor) -> FloatArray:
    """The tensor as float32 on the host."""
    floats: FloatArray = tensor.float().cpu().contiguous().numpy()
    return floats
