"""Transformers' own modules, computing from the values that quantisation leaves: the reference of
a quantised model.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from verifier.gpu.fp8 import quantised
from verifier.transformers_model.fp8_weights import Fp8Linear


@contextlib.contextmanager
def computed_in(
    model: PreTrainedModel, dtype: torch.dtype, *, quantization: str, rounds_rows: bool = False
) -> Iterator[None]:
    """Within the context, the model computes in `dtype`.

    Args:
        quantization: "none" or "fp8", of weights that are not quantised yet.
        rounds_rows: whether the rows that layers in FP8 multiply are FP8 values, too.
    """
    modules = set() if quantization == "none" else _quantised_modules(model)
    rounded = modules if rounds_rows else set()
    handles = [module.register_forward_pre_hook(_round_rows) for module in rounded]
    layers = {each: each.rounds_rows for each in model.modules() if isinstance(each, Fp8Linear)}
    try:
        for layer in layers:
            layer.rounds_rows = rounds_rows
        with replaced_weights(model, _values_in(dtype, modules)):
            yield
    finally:
        for layer, own in layers.items():
            layer.rounds_rows = own
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def replaced_weights(
    model: PreTrainedModel, value: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Within the context, the model computes with other weights: `value` of a module's own.

    Each module's weights are replaced only while it runs: that takes the memory of one module, of
    the largest embedding at most, instead of a second model's.
    """
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def replace(module: torch.nn.Module, _: Any) -> None:
        with torch.inference_mode(mode=False):
            for parameter in module.parameters(recurse=False):
                kept[parameter] = parameter.data
                parameter.data = value(module, parameter.data)

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    handles = []
    try:
        for module in cast(torch.nn.Module, model).modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(replace))
                handles.append(module.register_forward_hook(restore, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _values_in(
    dtype: torch.dtype, modules: set[torch.nn.Module]
) -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
    def value(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
        # Of experts, a matrix is their biases.
        of_experts = any(p.dim() == 3 for p in module.parameters(recurse=False))
        if module not in modules or weight.dim() < 2 + of_experts:
            return weight.to(dtype) if weight.is_floating_point() else weight
        # GPT-OSS's experts are [E, K, N].
        is_by_columns = bool(getattr(module, "is_transposed", False))
        by_rows = weight.float().mT if is_by_columns else weight.float()
        values, scale = quantised(by_rows.reshape(-1, by_rows.shape[-1]))
        product = (values.float() * scale).view(by_rows.shape).to(dtype)
        return product.mT.contiguous() if is_by_columns else product

    return value


def _round_rows(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    rows: torch.Tensor = inputs[0]
    values, scale = quantised(rows.reshape(-1, rows.shape[-1]))
    return ((values.float() * scale).to(rows.dtype).view_as(rows), *inputs[1:])


def _quantised_modules(model: PreTrainedModel) -> set[torch.nn.Module]:
    """Linear layers except the output layer and routers, and experts whose weights are in one
    tensor.
    """
    return {
        module
        for name, module in cast(torch.nn.Module, model).named_modules()
        if (
            isinstance(module, torch.nn.Linear)
            and module is not model.get_output_embeddings()
            and not name.endswith(".router.proj")
        )
        or any(p.dim() == 3 for p in module.parameters(recurse=False))
    }
