"""Attention over random layouts against float64; hidden places hold large numbers."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from servicekit.kernels.memory import address_of
from tests.verifier.cpu.numpy_decoder import Array, values
from tests.volume import cases
from verifier.cpu.attention import MAX_TASK_ROWS, attend
from verifier.cpu.weights import FloatArray, WeightType

TYPES = [WeightType.FLOAT32, WeightType.BFLOAT16, WeightType.FLOAT16]
NUM_BLOCKS = 90
GUARD = 48


@dataclass(frozen=True, kw_only=True)
class Case:
    """Some query rows of one sequence and K/V head."""

    head_dim: int
    group: int
    first_row: int
    num_rows: int
    first_position: int
    window: int
    softcap: float

    def position(self, row: int) -> int:
        return self.first_position + (self.first_row + row) // self.group


def some_cases(num: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    return [
        Case(
            head_dim=16 * draw.randint(1, 8),
            group=draw.choice([1, 1, 2, 3, 7, 8]),
            first_row=draw.choice([0, draw.randrange(40)]),
            num_rows=draw.choice([1, 2, MAX_TASK_ROWS, draw.randint(1, MAX_TASK_ROWS)]),
            first_position=draw.choice([0, draw.randrange(50), draw.randrange(1100)]),
            window=draw.choice([0, 0, 1, 15, 16, 17, draw.randint(1, 600)]),
            softcap=draw.choice([0.0, 0.0, 2.0, 50.0]),
        )
        for _ in range(num)
    ]


def stored(x: FloatArray, weight_type: WeightType) -> Array:
    """Bits of x, cut off."""
    match weight_type:
        case WeightType.BFLOAT16:
            return (x.view(np.uint32) >> 16).astype(np.uint16)
        case WeightType.FLOAT16:
            return x.astype(np.float16).view(np.int16)
    return x


def expected_rows(case: Case, queries: FloatArray, keys: Array, own: Array, scale: float) -> Array:
    """[num_rows, head_dim] from keys and values [positions, head_dim]."""
    result = np.empty((case.num_rows, case.head_dim))
    for row, query in enumerate(queries.astype(np.float64)):
        position = case.position(row)
        seen = slice(max(0, position - case.window + 1) if case.window else 0, position + 1)
        scores = keys[seen] @ query * scale
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        shares = np.exp(scores - scores.max())
        result[row] = shares / shares.sum() @ own[seen]
    return result


@pytest.mark.parametrize("weight_type", TYPES, ids=lambda each: each.name.lower())
def test_random_layouts_are_the_definition(weight_type: WeightType) -> None:
    draw = np.random.default_rng(6)
    marker = np.empty(0, dtype=weight_type.value)
    for case in some_cases(cases(60, 150), seed=7):
        head_dim = case.head_dim
        length = case.position(case.num_rows - 1) + 1
        num_used = -(-length // 16)
        table = draw.permutation(NUM_BLOCKS)[:num_used].astype(np.int32)
        # What is not the sequence's, even in its last block, is as large as the type allows.
        cache = np.full((NUM_BLOCKS, 2, head_dim * 16), 6e4, dtype=np.float32)
        packed = draw.standard_normal((2, num_used * 16, head_dim)).astype(np.float32)
        packed[:, length:] = 6e4
        keys, own = packed.reshape(2, num_used, 16, head_dim)
        cache[table, 0] = keys.swapaxes(1, 2).reshape(num_used, -1)
        pieces = own.reshape(num_used, 16, head_dim // 16, 16).swapaxes(1, 2)
        cache[table, 1] = pieces.reshape(num_used, -1)
        bits = stored(cache, weight_type)
        kept = values(stored(packed, weight_type), weight_type)

        queries = draw.standard_normal((case.num_rows, head_dim)).astype(np.float32)
        num_tokens = (case.first_row + case.num_rows - 1) // case.group + 1
        out = np.full((num_tokens, case.group * head_dim + GUARD), 7, dtype=np.float32)
        scores = np.empty((MAX_TASK_ROWS, num_used * 16 + 16), dtype=np.float32)
        result = np.empty((MAX_TASK_ROWS, head_dim), dtype=np.float32)
        scale = 3 / head_dim**0.5
        attend(
            marker, address_of(out), out.strides[0], address_of(queries), address_of(bits),
            address_of(bits) + bits.strides[1], address_of(table), bits.strides[0], case.num_rows,
            case.group, case.first_row, case.first_position, head_dim, case.window,
            np.float32(scale), np.float32(case.softcap), address_of(scores), scores.strides[0],
            address_of(result),
        )  # fmt: skip
        rows = [divmod(case.first_row + row, case.group) for row in range(case.num_rows)]
        ours = np.stack([out[t, h * head_dim : (h + 1) * head_dim] for t, h in rows])
        expected = expected_rows(case, queries, kept[0], kept[1], scale)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5, err_msg=str(case))
        for t, h in rows:
            out[t, h * head_dim : (h + 1) * head_dim] = 7
        assert (out == 7).all(), f"written outside: {case}"


def test_scores_far_apart_and_equal_ones() -> None:
    """One key takes all; equal keys share."""
    marker = np.empty(0, dtype=np.float32)
    keys = np.zeros((2, 16, 16), dtype=np.float32)
    own = np.random.default_rng(8).standard_normal((2, 16, 16)).astype(np.float32)
    query = np.zeros((1, 16), dtype=np.float32)
    query[0, 0] = 1e4
    cache = np.stack((keys, own), axis=1)
    table = np.arange(2, dtype=np.int32)
    for largest in (None, 20):
        cache[:, 0] = 0
        if largest is not None:
            cache[largest // 16, 0, 0, largest % 16] = 1e4
        out, result = np.empty((2, 1, 16), dtype=np.float32)
        scores = np.empty((1, 48), dtype=np.float32)
        attend(
            marker, address_of(out), 64, address_of(query), address_of(cache),
            address_of(cache) + cache.strides[1], address_of(table), cache.strides[0], 1, 1, 0, 27,
            16, 0, np.float32(1), np.float32(0), address_of(scores), scores.strides[0],
            address_of(result),
        )  # fmt: skip
        flat = own.reshape(32, 16)
        expected = flat[:28].mean(axis=0) if largest is None else flat[largest]
        np.testing.assert_allclose(out[0], expected, rtol=0, atol=1e-6)
