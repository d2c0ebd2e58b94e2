"""Attention over random layouts against float64; hidden places hold large numbers."""

import dataclasses
import random
from dataclasses import dataclass

import numpy as np
import pytest

from servicekit.kernels.memory import address_of
from tests.verifier.cpu.numpy_decoder import Array, values
from tests.volume import cases
from verifier.checkpoint.weight_types import BitsArray, FloatArray, WeightType
from verifier.cpu.kernels.attention import MAX_TASK_ROWS, attend, scratch_bytes
from verifier.cpu.kernels.tiles import TABLE_PADDING

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
    for case in some_cases(cases(60, 150), seed=7):
        keys, own, cache, table = some_kv(case, weight_type, draw)
        queries = draw.standard_normal((case.num_rows, case.head_dim)).astype(np.float32)
        scale = 3 / case.head_dim**0.5
        ours = attended(case, queries, cache, table, scale)
        expected = expected_rows(case, queries, keys, own, scale)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5, err_msg=str(case))


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    draw = np.random.default_rng(9)
    # Windows that begin in other blocks, and see several chunks.
    windows = Case(
        head_dim=16, group=1, first_row=0, num_rows=96, first_position=900, window=600, softcap=0
    )
    for case in [windows, *some_cases(40, seed=10)]:
        _, _, cache, table = some_kv(case, WeightType.FLOAT32, draw)
        queries = draw.standard_normal((case.num_rows, case.head_dim)).astype(np.float32)
        together = attended(case, queries, cache, table, 1)
        for row in {0, case.num_rows // 2, case.num_rows - 1}:
            one = dataclasses.replace(case, first_row=case.first_row + row, num_rows=1)
            alone = attended(one, queries[row : row + 1], cache, table, 1)
            np.testing.assert_array_equal(alone[0], together[row], err_msg=f"{case}, row {row}")


@pytest.mark.parametrize("largest", [None, 0, 300, 599])
def test_scores_far_apart_and_equal_ones(largest: int | None) -> None:
    """One key takes all, whichever chunk of positions it is in; equal keys share."""
    case = Case(
        head_dim=16, group=1, first_row=0, num_rows=1, first_position=600, window=0, softcap=0
    )
    _, own, cache, table = some_kv(case, WeightType.FLOAT32, np.random.default_rng(8))
    cache[:, 0] = 0
    if largest is not None:
        cache[table[largest // 16], 0, largest % 16] = 1e4
    query = np.zeros((1, 16), dtype=np.float32)
    query[0, 0] = 1e4
    expected = own[:601].mean(axis=0) if largest is None else own[largest]
    ours = attended(case, query, cache, table, 1)
    np.testing.assert_allclose(ours[0], expected, rtol=0, atol=1e-6)


def some_kv(
    case: Case, weight_type: WeightType, draw: np.random.Generator
) -> tuple[Array, Array, BitsArray, Array]:
    """Keys and values [positions, head_dim] as they are kept, and the cache [blocks, 2,
    head_dim * 16] and block table that hold them.
    """
    length, head_dim = case.position(case.num_rows - 1) + 1, case.head_dim
    num_used = -(-length // 16)
    blocks = draw.permutation(NUM_BLOCKS)[:num_used].astype(np.int32)
    # What is not the sequence's, even in its last block, is as large as the type allows.
    cache = np.full((NUM_BLOCKS, 2, head_dim * 16), 6e4, dtype=np.float32)
    packed = draw.standard_normal((2, num_used * 16, head_dim)).astype(np.float32)
    packed[:, length:] = 6e4
    keys, own = packed.reshape(2, num_used, 16, head_dim)
    cache[blocks, 0] = keys.swapaxes(1, 2).reshape(num_used, -1)
    pieces = own.reshape(num_used, 16, head_dim // 16, 16).swapaxes(1, 2)
    cache[blocks, 1] = pieces.reshape(num_used, -1)
    kept = values(stored(packed, weight_type), weight_type)
    return kept[0], kept[1], stored(cache, weight_type), np.pad(blocks, (0, TABLE_PADDING))


def attended(
    case: Case, queries: FloatArray, cache: BitsArray, table: Array, scale: float
) -> Array:
    """[num_rows, head_dim] by the kernel, which writes nothing else."""
    head_dim = case.head_dim
    num_tokens = (case.first_row + case.num_rows - 1) // case.group + 1
    out = np.full((num_tokens, case.group * head_dim + GUARD), 7, dtype=np.float32)
    scratch = np.empty(scratch_bytes(head_dim), dtype=np.uint8)
    attend(
        np.empty(0, dtype=cache.dtype), address_of(out), out.strides[0], address_of(queries),
        address_of(cache), address_of(cache) + cache.strides[1], address_of(table),
        cache.strides[0], case.num_rows, case.group, case.first_row, case.first_position, head_dim,
        case.window, np.float32(scale), np.float32(case.softcap), 0, address_of(scratch),
    )  # fmt: skip
    rows = [divmod(case.first_row + row, case.group) for row in range(case.num_rows)]
    places = [(t, slice(h * head_dim, (h + 1) * head_dim)) for t, h in rows]
    result = np.stack([out[place] for place in places])
    for place in places:
        out[place] = 7
    assert (out == 7).all(), f"written outside: {case}"
    return result
