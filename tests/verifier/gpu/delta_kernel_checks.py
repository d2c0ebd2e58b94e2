"""Checks of the kernels of gated delta nets against plain torch.

Run in the interpreter by `test_in_the_interpreter.py`, on a GPU by
`tests/gpu/test_decoder_kernels.py`.
"""

import random
from typing import Any

import pytest
import torch

from tests.verifier.gpu.kernel_checks import DEVICE, DTYPES, TOLERANCES, numbers
from verifier.checkpoint.delta_shape import DeltaShape
from verifier.gpu.kernels.delta_rule import compute_delta
from verifier.gpu.layers.deltas import plain_delta
from verifier.gpu.layers.states import LayerStates, StateTables
from verifier.gpu.weights import DeltaNet

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NUM_SLOTS, MAX_DRAFTS = 7, 3
SHAPES = [
    DeltaShape(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=64, kernel_size=4),
    DeltaShape(
        num_key_heads=2, num_value_heads=4, key_dim=48, value_dim=32, kernel_size=3,
        takes_turns=True,
    ),
]  # fmt: skip


def some_net(shape: DeltaShape) -> DeltaNet:
    heads = shape.num_value_heads
    return DeltaNet(
        inputs=lambda rows: rows,
        numbers=lambda rows: rows,
        convolution=numbers(shape.kernel_size, shape.num_channels, seed=1),
        decay_rate=numbers(heads, seed=2).abs() * 0.1,
        decay_bias=numbers(heads, seed=3),
        norm=numbers(shape.value_dim, seed=4),
    )


class World:
    """Slots with any contents, and a step of four sequences and a padded entry."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        heads = shape.num_value_heads
        width = shape.num_channels + 2 * heads
        self.shape = shape
        self.net = some_net(shape)
        # Raw inputs lie beside the gates.
        inputs = numbers(13, shape.num_channels + heads * shape.value_dim, seed=5, dtype=dtype)
        self.channels = inputs[:, : shape.num_channels]
        self.numbers = numbers(13, 2 * heads, seed=6, dtype=dtype)
        sizes = NUM_SLOTS, heads, shape.key_dim, shape.value_dim
        rows = shape.kernel_size - 1 + MAX_DRAFTS
        self.states = LayerStates(
            numbers(*sizes, seed=7), numbers(NUM_SLOTS, rows, width, seed=8, dtype=dtype)
        )
        # Two accepted drafts, kept after the first, one certain token, and two drafts; a text from
        # its beginning, kept after two tokens and at its end; one token, from another slot's
        # states; two tokens of padding, which no entry has.
        self.tables = StateTables(
            counts=self._indices([3, 11, 0]),
            cu_seqlens_q=self._indices([0, 3, 10, 11, 11]),
            entries=self._indices([[1, 1, 2, 2], [0, -1, 0, 1], [2, 3, 0, 0], [9, 9, 9, 9]]),
            save_offsets=self._indices([0, 1, 3, 3, 9]),
            saves=self._indices([[1, 6], [2, 4], [6, 5], [9, 9]]),
        )

    @staticmethod
    def _indices(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def run(self, rule: Any) -> tuple[torch.Tensor, LayerStates, torch.Tensor]:
        states = LayerStates(*(each.clone() for each in self.states))
        is_bad = torch.zeros(13, dtype=torch.int32, device=DEVICE)
        outputs = rule(
            self.channels, self.numbers, self.net, self.shape, states, self.tables, is_bad
        )
        return outputs[:11], states, is_bad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_states_are_those_of_plain_torch(shape: DeltaShape, dtype: torch.dtype) -> None:
    world = World(shape, dtype)
    outputs, states, is_bad = world.run(compute_delta)
    expected, expected_states, _ = world.run(plain_delta)
    tolerance = TOLERANCES[torch.float32]
    torch.testing.assert_close(outputs, expected, **tolerance)
    torch.testing.assert_close(states.states, expected_states.states, **tolerance)
    # Copied, and nothing else written.
    assert torch.equal(states.recent, expected_states.recent)
    assert torch.equal(states.states[3], world.states.states[3])
    assert not is_bad.any()


def test_raw_inputs_that_are_not_finite_are_marked() -> None:
    """Of a channel of the last head, and of a number of the first one: in their own tokens."""
    world = World(SHAPES[0], torch.float32)
    world.channels[4, -1] = float("nan")
    world.numbers[10, 0] = float("inf")
    for rule in (compute_delta, plain_delta):
        _, _, is_bad = world.run(rule)
        assert is_bad.nonzero().flatten().tolist() == [4, 10]


@pytest.mark.parametrize("seed", range(2))
def test_bits_do_not_depend_on_how_a_text_is_cut(seed: int) -> None:
    """In one piece; and in pieces with drafts, of which any number is accepted, beside others."""
    world, draw = World(SHAPES[1], torch.float32), random.Random(seed)
    shape, num_tokens = world.shape, 11
    channels, own_numbers = (each[:num_tokens] for each in (world.channels, world.numbers))
    states = LayerStates(*(torch.zeros_like(each) for each in world.states))
    is_bad = torch.zeros(30, dtype=torch.int32, device=DEVICE)

    def run(slot: int, start: int, end: int, num_accepted: int, drafts: list[int]) -> torch.Tensor:
        """Tokens [start, end), then drafts with these tokens' inputs; beside another sequence."""
        own = [*range(start, end), *drafts]
        rows = [0, 1, *own]
        tables = StateTables(
            counts=world._indices([2]),
            cu_seqlens_q=world._indices([0, 2, len(rows)]),
            entries=world._indices(
                [[5, -1, 0, 0], [slot, slot if start else -1, num_accepted, len(drafts)]]
            ),
            save_offsets=world._indices([0, 0, 0]),
            saves=world._indices([[0, 0]]),
        )
        outputs = compute_delta(
            channels[rows], own_numbers[rows], world.net, shape, states, tables, is_bad
        )
        return outputs[2 : 2 + end - start + len(drafts)]

    whole = run(0, 0, num_tokens, 0, [])
    start, accepted = 0, 0
    while start < num_tokens:
        end = min(num_tokens, start + draw.randint(1, 3))
        # Right ones, then wrong ones.
        num_right = min(num_tokens - end, draw.randint(0, 2))
        drafts = [*range(end, end + num_right), *[2] * draw.randint(0, MAX_DRAFTS - num_right)]
        rows = run(1, start, end, accepted, drafts)
        assert torch.equal(rows[: end - start + num_right], whole[start : end + num_right])
        accepted = draw.randint(0, num_right)
        start = end + accepted
    assert start >= num_tokens
