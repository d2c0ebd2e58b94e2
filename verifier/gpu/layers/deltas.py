"""Gated delta nets, which some models have in place of attention in most layers.

`verifier.cpu.kernels.delta` defines them. States are computed token by token, in float32; no bit
depends on how a text is cut. A token's raw inputs are the outputs of products, of the model's
dtype; all else is float32.

Shape legend: T tokens, J inputs that a convolution sees, C its channels (queries, keys, values), G
key heads, V value heads, B entries.
"""

from typing import Protocol

import torch
import torch.nn.functional

from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.weight_types import Activation
from verifier.gpu.layers.states import LayerStates, StateTables
from verifier.gpu.operations import Operations
from verifier.gpu.weights import DeltaNet

EPS = 1e-6
"""Added to the square of a query's or a key's length."""


class DeltaRule(Protocol):
    """How convolution and states are computed."""

    def __call__(
        self,
        channels: torch.Tensor,
        numbers: torch.Tensor,
        net: DeltaNet,
        shape: DeltaShape,
        states: LayerStates,
        tables: StateTables,
        is_bad: torch.Tensor,
    ) -> torch.Tensor:
        """Takes in the accepted drafts and the step's tokens; writes states and raw inputs.

        Args:
            channels: [T, C] of the model's dtype; rows may lie apart.
            numbers: [T, 2 * V], the same: what steps are made of, then decays.
            states: written.
            is_bad: [T] int32; set to 1 where a raw input is not finite, else left as it is.

        Returns:
            [T, V, value_dim] float32, neither normed nor gated; rows of padding are left as they
            were allocated.
        """
        ...


def run_delta(
    net: DeltaNet,
    rows: torch.Tensor,
    shape: DeltaShape,
    states: LayerStates,
    tables: StateTables,
    is_bad: torch.Tensor,
    operations: Operations,
    *,
    eps: float,
) -> torch.Tensor:
    """[T, V * value_dim] of rows [T, H], both of the model's dtype; before the last product."""
    inputs = net.inputs(rows)
    channels, gates = inputs.tensor_split((shape.num_channels,), dim=1)
    rule = delta_rule_for(rows.device)
    outputs = rule(channels, net.numbers(rows), net, shape, states, tables, is_bad)
    normed = operations.add_norm(
        outputs.view(-1, shape.value_dim), None, None, net.norm, eps=eps, dtype=torch.float32
    )
    return operations.gate(gates, Activation.SILU, normed.view(gates.shape))


def delta_rule_for(device: torch.device) -> DeltaRule:
    """Triton's on a GPU, torch's elsewhere."""
    if device.type == "cuda":
        from verifier.gpu.kernels.delta_rule import compute_delta

        return compute_delta
    return plain_delta


def plain_delta(
    channels: torch.Tensor,
    numbers: torch.Tensor,
    net: DeltaNet,
    shape: DeltaShape,
    states: LayerStates,
    tables: StateTables,
    is_bad: torch.Tensor,
) -> torch.Tensor:
    """Sequence by sequence, row by row, for CPUs; the oracle of the kernels."""
    raw = torch.cat((channels, numbers), dim=1)
    is_bad.masked_fill_(~raw.isfinite().all(dim=1), 1)
    sizes = len(raw), shape.num_value_heads, shape.value_dim
    outputs = torch.zeros(sizes, device=raw.device)
    num_before = shape.kernel_size - 1
    for entry in range(int(tables.counts[0])):
        slot, source, num_accepted, num_drafts = tables.entries[entry].tolist()
        start, end = tables.cu_seqlens_q[entry : entry + 2].tolist()
        first_save, end_save = tables.save_offsets[entry : entry + 2].tolist()
        saves = dict(tables.saves[first_save:end_save].tolist())
        if source < 0:
            state = torch.zeros_like(states.states[slot])
            before = torch.zeros_like(states.recent[slot, :num_before])
        else:
            state = states.states[source].clone()
            before = states.recent[source, : num_before + num_accepted].clone()
        own = torch.cat((before, raw[start:end]))
        num_certain = num_accepted + end - start - num_drafts
        for row in range(num_accepted + end - start):
            window = own[row : row + num_before + 1].float()
            state, output = _step(window, state, net, shape)
            if row >= num_accepted:
                outputs[start + row - num_accepted] = output
            if row + 1 in (num_certain, *saves):
                kept = slot if row + 1 == num_certain else saves[row + 1]
                for to in {kept, saves.get(row + 1, kept)}:
                    states.states[to] = state
                    states.recent[to, :num_before] = own[row + 1 : row + 1 + num_before]
        states.recent[slot, num_before : num_before + num_drafts] = own[len(own) - num_drafts :]
    return outputs


def _step(
    window: torch.Tensor, state: torch.Tensor, net: DeltaNet, shape: DeltaShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states [V, key_dim, value_dim] after one more token, and its outputs [V, value_dim].

    Args:
        window: [J, C + 2 * V], the raw inputs up to the token.
    """
    keys, heads = shape.num_key_heads * shape.key_dim, shape.num_value_heads
    made, numbers = window.split((shape.num_channels, 2 * heads), dim=1)
    made = torch.nn.functional.silu((made * net.convolution).sum(dim=0))
    steps, decays = numbers[-1].chunk(2)
    steps = steps.sigmoid()
    decays = torch.exp(-net.decay_rate * torch.nn.functional.softplus(decays + net.decay_bias))
    queries, keys_, values = made.split((keys, keys, heads * shape.value_dim))
    of_key = [_key_head(shape, head) for head in range(heads)]
    queries, keys_ = (
        (each * torch.rsqrt(each.square().sum(dim=1, keepdim=True) + EPS))[of_key]
        for each in (part.view(-1, shape.key_dim) for part in (queries, keys_))
    )
    queries = queries * shape.key_dim**-0.5
    values = values.view(heads, shape.value_dim)
    seen = torch.einsum("hk,hkv->hv", keys_, state)
    changes = steps[:, None] * (values - decays[:, None] * seen)
    state = decays[:, None, None] * state + keys_[:, :, None] * changes[:, None]
    return state, torch.einsum("hk,hkv->hv", queries, state)


def _key_head(shape: DeltaShape, value_head: int) -> int:
    """The key head that a value head shares."""
    if shape.takes_turns:
        return value_head % shape.num_key_heads
    return value_head // (shape.num_value_heads // shape.num_key_heads)
