"""A transformers model over the paged K/V cache.

The model definition is transformers' own; only its attention function is ours, registered under
a name for which transformers builds no mask. A step is one packed [1, T] input with explicit
positions and without transformers' cache. The step's prepared attention is passed to the attention
function through the model's keyword arguments.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from verifier.attention.backend import AttentionBackend, StepAttention, to_device
from verifier.attention.kv_cache import KVCache
from verifier.batch.batch_layout import BatchLayout
from verifier.gpu.current_device import current_device
from verifier.gpu.device_model import DeviceModel, as_floats
from verifier.tensor_parallel.collectives import Collectives

ATTENTION_NAME = "tandem_paged"

# Keyword arguments of transformers' attention functions that have no effect here: there is no
# dropout outside of training, positions are in the layout, and a model whose attention is not
# causal fails the parity probe. Any other (softcap, sinks, sparse indices) changes the result.
_HARMLESS_ARGUMENTS = frozenset(
    (
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    )
)


class UnsupportedAttentionError(Exception):
    """The model's attention needs something that would be computed wrongly here."""


class TransformersModel(DeviceModel):
    """A model of transformers with paged attention."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: AttentionBackend,
        cache: KVCache,
        device: torch.device,
        collectives: Collectives | None = None,
    ) -> None:
        """`collectives`: if the model is one rank's part."""
        super().__init__(vocab_size=int(model.config.vocab_size), device=device)
        self._model = model
        self._backend = backend
        self._cache = cache
        self._device = device
        self._collectives = collectives

    def forward_on_device(self, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode(), current_device(self._device):
            return self._checked_forward(layout)

    def _checked_forward(self, layout: BatchLayout) -> tuple[torch.Tensor, torch.Tensor]:
        self.hidden_states = None
        self._cache.begin_step()
        logits = self._forward_keeping(layout)
        if not self._cache.is_written:
            raise UnsupportedAttentionError(
                "its attention does not go through transformers' interface of attention functions"
            )
        kv_is_finite = self._cache.finite_rows()
        if self._collectives is not None:
            # Each rank checks its own heads only.
            kv_is_finite = self._collectives.sum((~kv_is_finite).float()) == 0
        return logits, kv_is_finite

    def _forward_keeping(self, layout: BatchLayout) -> torch.Tensor:
        if layout.wants_hidden_states:
            with self._keeping_hidden_states(layout):
                return self._forward(layout)
        return self._forward(layout)

    def _forward(self, layout: BatchLayout) -> torch.Tensor:
        output = cast(Any, self._model)(
            input_ids=self._on_device(layout.input_token_ids)[None],
            position_ids=self._on_device(layout.positions)[None],
            logits_to_keep=self._on_device(layout.logits_indices),
            use_cache=False,
            step_attention=self._backend.prepare(layout, self._cache),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @contextlib.contextmanager
    def _keeping_hidden_states(self, layout: BatchLayout) -> Iterator[None]:
        """Within the context, stores the output layer's input, in any model the hidden states."""

        def keep(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            states = arguments[0][0, self._on_device(layout.scored_logits_indices)]
            self.hidden_states = as_floats(states)

        head = cast(torch.nn.Module, self._model.get_output_embeddings())
        handle = head.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def _on_device(self, array: Any) -> torch.Tensor:
        return to_device(array, self._device)


def register_attention() -> None:
    """Makes `attn_implementation=ATTENTION_NAME` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    step_attention: StepAttention | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface: query [1, num_heads, T, head_dim] and so on."""
    for name in arguments.keys() - _HARMLESS_ARGUMENTS:
        if arguments[name] is not None:
            raise UnsupportedAttentionError(f"attention argument {name!r} is not supported")
    if attention_mask is not None:
        raise UnsupportedAttentionError("an attention mask of the model's own is not supported")
    if step_attention is None:
        raise UnsupportedAttentionError("the model hands no arguments on to its attention")
    output = step_attention.attend(
        cast(int, module.layer_idx),
        query[0],
        key[0],
        value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
    )
    return output[None], None
