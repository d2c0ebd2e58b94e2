"""Cuts a loaded model into this rank's part, by transformers' plan for the model.

The plan is data: it says for each module or parameter how it is cut. Only linear layers and
experts are cut; embeddings stay whole on every rank. transformers' own code for the plan keeps
weights as distributed tensors, which are converted at every call, and ignores `--device`.

Shapes: a linear layer's weight is [out_features, in_features].
"""

import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from servicekit.config import ConfigError
from verifier.tensor_parallel.collectives import Collectives

FLAG = "--tensor-parallel-size"

# Whole on every rank. Embeddings are small beside the layers, and a lookup needs no collective.
_WHOLE = {"embedding_rowwise", "replicate", "replicated_with_grad_allreduce"}


class RowParallelLinear(nn.Module):
    """Holds some columns of the weight; the bias is added to the sum of the ranks' products.

    Not an `nn.Linear`, so that no code treats it as one and leaves out the sum.
    """

    def __init__(self, whole: nn.Linear, collectives: Collectives, *, splits_input: bool) -> None:
        super().__init__()
        self.part = _linear(_part(whole.weight, 1, collectives), None)
        self.bias = whole.bias
        self._collectives = collectives
        self._splits_input = splits_input

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Whole output rows, from rows [..., in_features / size] or, if it splits its input, whole
        rows.
        """
        if self._splits_input:
            rows = _part(rows, -1, self._collectives)
        summed = self._collectives.sum(self.part(rows))
        return summed if self.bias is None else summed + self.bias


class GatheredLinear(nn.Module):
    """Holds some rows of the weight; every rank gets the whole output."""

    def __init__(self, whole: nn.Linear, collectives: Collectives) -> None:
        super().__init__()
        bias = None if whole.bias is None else _part(whole.bias, 0, collectives)
        self.part = _linear(_part(whole.weight, 0, collectives), bias)
        self._collectives = collectives

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._collectives.concatenate(self.part(rows))


def shard(
    model: PreTrainedModel,
    collectives: Collectives,
    device: torch.device,
    *,
    convert: Callable[[str], object] | None = None,
) -> None:
    """Cuts the model in place and frees the other ranks' parts.

    What is cut moves to the device at once: memory elsewhere holds one module's part at a time.

    Args:
        convert: called with the name of each module once its part is on the device; may replace it.

    Raises:
        ConfigError: it cannot be cut into so many parts.
    """
    size = collectives.size
    plan = _plan(model, size)
    _check_heads(model, plan, size)
    for name, module in list(model.named_modules()):
        is_cut = False
        for parameter, _ in list(module.named_parameters(recurse=False)):
            style = plan.get(_pattern(f"{name}.{parameter}"))
            if style is not None:
                _cut_parameter(module, parameter, f"{name}.{parameter}", style, collectives)
                is_cut = True
        style = plan.get(_pattern(name))
        if style is not None and style not in _WHOLE:
            _cut_module(model, module, name, style, collectives)
            is_cut = True
        if is_cut:
            model.get_submodule(name).to(device)
            if convert is not None:
                convert(name)


def num_local_kv_heads(model: PreTrainedModel, num_kv_heads: int, size: int) -> int:
    """The number of K/V heads of a rank: all of them if the plan does not cut attention."""
    return num_kv_heads // size if _cuts_heads(_plan(model, size)) else num_kv_heads


def _cut_module(
    model: PreTrainedModel, module: nn.Module, name: str, style: str, collectives: Collectives
) -> None:
    if style == "moe_tp_experts":
        # Its parameters have rules of their own; the outputs of the parts are added.
        module.register_forward_hook(lambda _module, _inputs, output: collectives.sum(output))
        return
    if not isinstance(module, nn.Linear):
        raise ConfigError(FLAG, f"{collectives.size}: {name} is no linear layer")
    try:
        match style:
            case "colwise":
                module.weight = _parameter(_part(module.weight, 0, collectives))
                if module.bias is not None:
                    module.bias = _parameter(_part(module.bias, 0, collectives))
                module.out_features = module.weight.shape[0]
            case "rowwise" | "rowwise_split_input" | "rowwise_rep":
                splits_input = style != "rowwise"
                model.set_submodule(
                    name, RowParallelLinear(module, collectives, splits_input=splits_input)
                )
            case "colwise_gather_output" | "colwise_rep":
                # A layer that cannot be cut evenly, as by its vocabulary, stays whole.
                if module.out_features % collectives.size == 0:
                    model.set_submodule(name, GatheredLinear(module, collectives))
            case _:
                raise ConfigError(FLAG, f"{collectives.size}: {name} would be cut {style}")
    except _IndivisibleError as error:
        raise _indivisible(name, error, collectives) from None


def _cut_parameter(
    module: nn.Module, parameter: str, name: str, style: str, collectives: Collectives
) -> None:
    """Cuts a parameter outside linear layers: experts' weights [experts, out, in]."""
    whole = module.get_parameter(parameter)
    try:
        match style:
            case "rowwise":
                cut = _part(whole, -1, collectives)
            case "packed_colwise":  # two projections, one after the other
                halves = [_part(half, -2, collectives) for half in whole.chunk(2, dim=-2)]
                cut = torch.cat(halves, dim=-2)
            case _:
                raise ConfigError(FLAG, f"{collectives.size}: {name} would be cut {style}")
    except _IndivisibleError as error:
        raise _indivisible(name, error, collectives) from None
    setattr(module, parameter, _parameter(cut))


def _plan(model: PreTrainedModel, size: int) -> dict[str, str]:
    plan: dict[str, str] | None = model.tp_plan
    if not plan:
        raise ConfigError(FLAG, f"{size}: transformers has no plan to cut {type(model).__name__}")
    return plan


def _cuts_heads(plan: dict[str, str]) -> bool:
    return any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items())


def _check_heads(model: PreTrainedModel, plan: dict[str, str], size: int) -> None:
    if not _cuts_heads(plan):
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(model.config, name, None)
        if count is not None and count % size:
            raise ConfigError(FLAG, f"{size}: does not divide the model's {name}, {count}")


def _pattern(name: str) -> str:
    """The name as in plans: a layer's number becomes a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class _IndivisibleError(Exception):
    """A dimension of this length cannot be cut evenly."""


def _indivisible(name: str, error: _IndivisibleError, collectives: Collectives) -> ConfigError:
    return ConfigError(FLAG, f"{collectives.size}: does not divide {name}, {error}")


def _part(tensor: torch.Tensor, dim: int, collectives: Collectives) -> torch.Tensor:
    """This rank's share of a dimension, a view."""
    length = tensor.shape[dim]
    if length % collectives.size:
        raise _IndivisibleError(length)
    share = length // collectives.size
    return tensor.narrow(dim, collectives.rank * share, share)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """An ordinary layer of a part: what replaces the model's linear layers replaces it, too."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = _parameter(weight)
    if bias is not None:
        linear.bias = _parameter(bias)
    return linear


def _parameter(part: torch.Tensor) -> nn.Parameter:
    # A copy: a view would keep the whole in memory.
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
