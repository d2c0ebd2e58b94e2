"""Inputs of every layer, beside the hidden state (Gemma 4).

Shape legend: T tokens, H hidden size, L layers, S a token's input of a layer.
"""

import math

import torch

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.operations import Operations
from verifier.gpu.weights import LayerInput, PerLayerInputs


def make_inputs(
    inputs: PerLayerInputs,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
    operations: Operations,
    *,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """All layers' inputs [T, L, S] of a dtype, the model's.

    Args:
        token_ids: [T].
        hidden: [T, H] float32, the scaled embeddings.
    """
    projected = inputs.projection(hidden.to(dtype)).float() * hidden.shape[1] ** -0.5
    normed = operations.add_norm(
        projected.view(-1, inputs.size), None, None, inputs.norm, eps=eps, dtype=torch.float32
    )
    embedded = inputs.embeddings[token_ids].float() * math.sqrt(inputs.size)
    both = (normed.view(embedded.shape) + embedded) * math.sqrt(0.5)
    return both.to(dtype).view(len(token_ids), -1, inputs.size)


def take_input(
    layer_input: LayerInput,
    hidden: torch.Tensor,
    own: torch.Tensor,
    activation: Activation,
    operations: Operations,
) -> torch.Tensor:
    """What is added to the residual stream, before its norm: [T, H] of the rows' dtype.

    Args:
        hidden: [T, H] of the model's dtype.
        own: [T, S], the layer's inputs.
    """
    gated = operations.gate(layer_input.gate(hidden), activation, own)
    return layer_input.down(gated)
