"""In which order a gated delta net's inputs are computed, of the forms in which they are stored."""

import itertools

from verifier.checkpoint.delta_shape import DeltaShape
from verifier.gpu.loading.device_tensors import Outputs


def delta_outputs(prefix: str, shape: DeltaShape) -> tuple[list[Outputs], list[Outputs]]:
    """The outputs of `DeltaNet.inputs`, and those of `DeltaNet.numbers`: of all heads, one after
    the other, in the order that the convolution and `DeltaShape.value_head` have.
    """
    groups, key_dim, value_dim = shape.num_key_heads, shape.key_dim, shape.value_dim
    heads = shape.num_value_heads // groups
    # Of each value head: its key head, and its place among that one's.
    places = {
        shape.value_head(group, place): (group, place)
        for group, place in itertools.product(range(groups), range(heads))
    }
    in_order = [places[head] for head in range(shape.num_value_heads)]
    if "in_proj_qkvz" in shape.inputs:
        # Key head by key head: its query, key, values and gates.
        name = prefix + "in_proj_qkvz"
        size = 2 * (key_dim + heads * value_dim)
        keys = [
            Outputs(name, group * size + part * key_dim, key_dim)
            for part in (0, 1)
            for group in range(groups)
        ]
        values = [
            Outputs(
                name, group * size + 2 * key_dim + (part * heads + place) * value_dim, value_dim
            )
            for part in (0, 1)
            for group, place in in_order
        ]
        inputs = [*keys, *values]
    else:
        inputs = [Outputs(prefix + "in_proj_qkv"), Outputs(prefix + "in_proj_z")]
    if "in_proj_ba" in shape.inputs:
        numbers = [
            Outputs(prefix + "in_proj_ba", (2 * group + part) * heads + place, 1)
            for part in (0, 1)
            for group, place in in_order
        ]
    else:
        numbers = [Outputs(prefix + "in_proj_b"), Outputs(prefix + "in_proj_a")]
    return inputs, numbers
