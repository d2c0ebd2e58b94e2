"""FP8 weights of transformers' models: linear layers whose weights are held in a byte each.

On a GPU their products are in FP8, too; on a CPU weights are widened to the model's dtype at every
use, so activations are not rounded. Embeddings, the output layer and norms keep their dtype.
"""

from typing import cast

import torch
from transformers import PreTrainedModel

from verifier.gpu.attention.selection import lack_of_triton
from verifier.gpu.fp8 import (
    TORCH_ROW_OPERATIONS,
    RowOperations,
    quantised,
    row_operations_for,
    scaled_linear,
    widened_linear,
)


class Fp8Linear(torch.nn.Module):
    """A linear layer. Weight [out_features, in_features] FP8, scale [out_features, 1] float32.

    Attributes:
        rounds_rows: whether it multiplies in FP8, so that its rows are rounded, too.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        linear: torch.nn.Linear,
        *,
        rounds_rows: bool = False,
        operations: RowOperations = TORCH_ROW_OPERATIONS,
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight, scale = quantised(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.rounds_rows = rounds_rows
        self._operations = operations

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight, scale, bias = self.weight, self.scale, self.bias
        if self.rounds_rows:
            return scaled_linear(rows, weight, scale, bias, self._operations)
        return widened_linear(rows, weight, scale, bias)


def multiplies_in_fp8(device: torch.device, quantization: str) -> bool:
    """Whether a model's linear layers do, on the device."""
    return quantization == "fp8" and device.type == "cuda"


def rounds_rows(model: PreTrainedModel) -> bool:
    """Whether the model's linear layers multiply in FP8."""
    modules = cast(torch.nn.Module, model).modules()
    return any(isinstance(module, Fp8Linear) and module.rounds_rows for module in modules)


def quantise_linear_layers(
    model: PreTrainedModel, device: torch.device, *, rounds_rows: bool = False, within: str = ""
) -> int:
    """Replaces the model's linear layers, except the output layer. Returns how many.

    The new layers are on the device, one after the other: memory elsewhere is that of one. Of a
    model that is cut into ranks, this rank's parts are replaced: a channel that is cut has a scale
    in each part, the smallest at which the part fits.

    Args:
        within: the name of a module that is or holds the layers; empty: all of them.
    """
    output_layer = cast(torch.nn.Module, model.get_output_embeddings())
    kept = set(output_layer.modules())
    names = [
        name
        for name, module in model.get_submodule(within).named_modules(prefix=within)
        if isinstance(module, torch.nn.Linear) and module not in kept
    ]
    operations = _row_operations(device)
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        layer = Fp8Linear(linear, rounds_rows=rounds_rows, operations=operations)
        model.set_submodule(name, layer.to(device))
    return len(names)


def _row_operations(device: torch.device) -> RowOperations:
    """Kernels on a GPU where Triton can run, else several of torch's operations for each."""
    if device.type == "cuda" and lack_of_triton() is not None:
        return TORCH_ROW_OPERATIONS
    return row_operations_for(device)
