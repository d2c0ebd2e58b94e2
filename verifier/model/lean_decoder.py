"""The forward pass of common dense decoders in few operations, from a transformers model.

transformers' modules run some hundred small operations per layer, one by one, under the
interpreter lock. If this file knows every module of a model (Llama, Mistral, Qwen2, Qwen3: RMS
norms, rotary embedding, grouped attention, gated SiLU), it computes the same with fused
projections, compiled as TorchScript: one call per step that does not hold the interpreter lock and
needs no compiler. Any other model, or one with a replaced module (sharded, quantised), runs as
transformers defines it. The parity probe compares both with transformers' own attention.

The original weights become views of the fused ones: no weight is stored twice.

Shape legend: T tokens of the step, D head_dim, G query heads per K/V head.
"""

import warnings
from collections.abc import Sequence as SequenceOf
from typing import Any, cast

import torch
import torch.nn.functional
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from verifier.attention.kv_cache import KVCache, are_rows_finite, row_sums_of
from verifier.attention.sdpa import SdpaBackend, attend_grouped
from verifier.batch.batch_layout import BatchLayout

_FAMILIES = ((llama, "Llama"), (mistral, "Mistral"), (qwen2, "Qwen2"), (qwen3, "Qwen3"))
_PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_MODELS = tuple(getattr(module, f"{name}ForCausalLM") for module, name in _FAMILIES)
_KNOWN_MODULES = {
    *_MODELS,
    *(getattr(module, name + part) for module, name in _FAMILIES for part in _PARTS),
    *(torch.nn.ModuleList, torch.nn.Linear, torch.nn.Embedding, torch.nn.SiLU, SiLUActivation),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_lean(model: PreTrainedModel) -> bool:
    """Whether `LeanDecoder` computes this model: every module is known and unchanged."""
    if type(model) not in _MODELS or not all(map(_is_known, model.modules())):
        return False
    parameters = list(model.parameters())
    if len({p.dtype for p in parameters}) > 1 or parameters[0].dtype not in _DTYPES:
        return False
    if any(type(p.data) is not torch.Tensor for p in parameters):
        return False
    body = cast(Any, model).model
    return all(
        2 * body.rotary_emb.inv_freq.numel() == layer.self_attn.head_dim for layer in body.layers
    )


class LeanModel:
    """A model that `is_lean` over the paged K/V cache. Owned by the engine thread."""

    def __init__(self, model: PreTrainedModel, *, backend: SdpaBackend, cache: KVCache) -> None:
        """Fuses the model's weights; its own become views of the fused ones."""
        config = model.config
        self._backend = backend
        self._cache = cache
        self._group = config.num_attention_heads // config.num_key_value_heads
        layers = cast(Any, model).model.layers
        # One attention module per distinct sliding window. The window is read from it in every
        # step, because the parity probe changes it.
        windowed = {_window_of(layer.self_attn): layer.self_attn for layer in layers}
        self._windowed = list(windowed.values())
        self._decoder = _compiled(LeanDecoder(model, list(windowed)))

    def forward(
        self, layout: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits, `kv_is_finite` and hidden states as in `TargetModel` and `KeepsHiddenStates`.
        Requires inference mode.
        """
        step = self._backend.prepare(layout, self._cache)
        logits, rows, kv_is_finite = self._decoder(
            torch.from_numpy(layout.input_token_ids),
            torch.from_numpy(layout.positions),
            torch.from_numpy(layout.logits_indices),
            self._cache.layers,
            step.slot_mapping,
            step.query_ends,
            step.first_slots,
            step.kv_lengths,
            step.scattered_slots,
            [
                step.masks(sliding_window=_window_of(attention), group=self._group)
                for attention in self._windowed
            ],
        )
        hidden_states = None
        if len(layout.hidden_state_indices):
            hidden_states = rows[torch.from_numpy(layout.scored_logits_indices)]
        return logits[: layout.num_rows], kv_is_finite, hidden_states


class LeanDecoder(torch.nn.Module):
    """Token ids in, logits out; writes K/V on the way. Written to be compiled as TorchScript."""

    def __init__(self, model: PreTrainedModel, sliding_windows: list[int | None]) -> None:
        super().__init__()
        body = cast(Any, model).model
        head = cast(Any, model).lm_head
        self.embedding = body.embed_tokens.weight.data
        self.head, self.head_bias = head.weight.data, _data(head.bias)
        self.norm = body.norm.weight.data
        self.norm_eps = float(body.norm.variance_epsilon)
        self.inv_freq = body.rotary_emb.inv_freq.float()
        self.rotary_scaling = float(body.rotary_emb.attention_scaling)
        self.layers = torch.nn.ModuleList(
            _LeanLayer(layer, index, sliding_windows.index(_window_of(layer.self_attn)))
            for index, layer in enumerate(body.layers)
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_ends: list[int],
        first_slots: list[int],
        kv_lengths: list[int],
        scattered_slots: list[torch.Tensor],
        masks: list[list[torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [R, vocab_size], the hidden states [R, hidden_size] that they were computed from,
        and whether the K/V of each token is finite [T].

        Args:
            token_ids, positions: [T]. logits_indices: [R].
            cache: [num_layers, 2 * num_kv_heads, num_slots, D], from `KVCache.layers`.
            slot_mapping, query_ends, first_slots, kv_lengths, scattered_slots: from `SdpaStep`.
            masks: from `SdpaStep.masks`, for each of the sliding windows.
        """
        hidden = torch.nn.functional.embedding(token_ids, self.embedding)
        angles = positions[:, None].to(torch.float32) * self.inv_freq
        cos = angles.cos() * self.rotary_scaling
        sin = angles.sin() * self.rotary_scaling
        # [T, 1, D]; with the sign of `rotate_half`.
        cos = torch.cat([cos, cos], dim=-1).to(hidden.dtype)[:, None]
        sin = torch.cat([-sin, sin], dim=-1).to(hidden.dtype)[:, None]
        row_sums: list[torch.Tensor] = []
        for layer in self.layers:
            hidden, sums = layer(
                hidden,
                cos,
                sin,
                cache,
                slot_mapping,
                query_ends,
                first_slots,
                kv_lengths,
                scattered_slots,
                masks,
            )
            row_sums.append(sums)
        rows = rms_norm(hidden.index_select(0, logits_indices), self.norm, self.norm_eps)
        logits = torch.nn.functional.linear(rows, self.head, self.head_bias)
        return logits, rows, are_rows_finite(row_sums)


class _LeanLayer(torch.nn.Module):
    def __init__(self, layer: Any, index: int, window_index: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.window_index = window_index
        self.head_dim = int(attention.head_dim)
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.scaling = float(attention.scaling)
        self.qkv, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = attention.o_proj.weight.data
        self.output_bias = _data(attention.o_proj.bias)
        self.gate_up, self.gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
        self.down, self.down_bias = mlp.down_proj.weight.data, _data(mlp.down_proj.bias)
        self.input_norm = layer.input_layernorm.weight.data
        self.post_norm = layer.post_attention_layernorm.weight.data
        self.eps = float(layer.input_layernorm.variance_epsilon)
        self.norms_heads = hasattr(attention, "q_norm")
        self.head_norm = self.input_norm
        if self.norms_heads:
            # [num_heads + num_kv_heads, D]
            self.head_norm = torch.cat(
                [
                    attention.q_norm.weight.data.expand(self.num_heads, -1),
                    attention.k_norm.weight.data.expand(self.num_kv_heads, -1),
                ]
            )

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_ends: list[int],
        first_slots: list[int],
        kv_lengths: list[int],
        scattered_slots: list[torch.Tensor],
        masks: list[list[torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output [T, hidden_size] and the `row_sums_of` its K/V; cos, sin [T, 1, D]."""
        num_tokens = hidden.shape[0]
        group = self.num_heads // self.num_kv_heads
        rows = rms_norm(hidden, self.input_norm, self.eps)
        heads = torch.nn.functional.linear(rows, self.qkv, self.qkv_bias).view(
            num_tokens, -1, self.head_dim
        )
        turned = heads[:, : self.num_heads + self.num_kv_heads]
        if self.norms_heads:
            turned = rms_norm(turned, self.head_norm, self.eps)
        swapped = turned.roll(self.head_dim // 2, -1)
        turned = torch.addcmul(turned * cos, swapped, sin)
        keys_and_values = torch.cat(
            [turned[:, self.num_heads :], heads[:, self.num_heads + self.num_kv_heads :]], dim=1
        )
        row_sums = row_sums_of(keys_and_values, [1, 2])
        layer_cache = cache[self.index]
        layer_cache.index_copy_(
            1,
            slot_mapping,
            torch.nan_to_num(keys_and_values.transpose(0, 1), nan=0.0, posinf=0.0, neginf=0.0),
        )
        queries = (
            turned[:, : self.num_heads]
            .reshape(num_tokens, self.num_kv_heads, group, self.head_dim)
            .transpose(0, 1)
            .reshape(self.num_kv_heads, num_tokens * group, self.head_dim)
        )
        attended = attend_grouped(
            queries,
            layer_cache,
            group,
            query_ends,
            first_slots,
            kv_lengths,
            scattered_slots,
            masks[self.window_index],
            self.scaling,
        )
        attended = (
            attended.view(self.num_kv_heads, num_tokens, group, self.head_dim)
            .transpose(0, 1)
            .reshape(num_tokens, self.num_heads * self.head_dim)
        )
        hidden = hidden + torch.nn.functional.linear(attended, self.output, self.output_bias)
        rows = rms_norm(hidden, self.post_norm, self.eps)
        gate, up = torch.nn.functional.linear(rows, self.gate_up, self.gate_up_bias).chunk(
            2, dim=-1
        )
        rows = torch.nn.functional.silu(gate).mul_(up)
        return hidden + torch.nn.functional.linear(rows, self.down, self.down_bias), row_sums


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension; in float32 up to the weight."""
    norm: torch.Tensor = torch.linalg.vector_norm(rows, 2.0, [-1], True, dtype=torch.float32)
    scale = (norm * norm).mul_(1.0 / rows.shape[-1]).add_(eps).rsqrt_()
    return (rows * scale).to(rows.dtype) * weight


def _compiled(decoder: LeanDecoder) -> torch.nn.Module:
    """The decoder as TorchScript."""
    with warnings.catch_warnings():
        # It is deprecated for torch.compile, which needs a C++ compiler on the machine.
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast(torch.nn.Module, torch.jit.script(decoder))


def _is_known(module: torch.nn.Module) -> bool:
    """Whether a module is one of those above, without hooks and with its own `forward`."""
    return (
        type(module) in _KNOWN_MODULES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in vars(module)
    )


def _fuse(linears: SequenceOf[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias for all; each layer's own become views of them."""
    weight = torch.cat([linear.weight.data for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some have a bias and some have none"
    bias = torch.cat([bias.data for bias in biases]) if biases else None
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


def _data(parameter: torch.nn.Parameter | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.data


def _window_of(attention: Any) -> int | None:
    """A layer's sliding window, read where transformers reads it."""
    holder = attention.config if isinstance(attention, mistral.MistralAttention) else attention
    return cast(int | None, getattr(holder, "sliding_window", None))
