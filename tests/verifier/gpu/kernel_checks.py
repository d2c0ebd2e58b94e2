"""Checks of the Triton kernels against plain torch, on a GPU or in Triton's interpreter.

Run in the interpreter by `test_in_the_interpreter.py`, on a GPU by
`tests/gpu/test_decoder_kernels.py`.
"""

import math
from typing import Any

import pytest
import torch

from verifier.checkpoint.weight_types import Activation
from verifier.gpu.kernels.operations import TritonOperations
from verifier.gpu.kernels.overlapping_kernels import can_overlap
from verifier.gpu.plain import PlainOperations

# numpy, which computes in the interpreter, warns of infinities; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# The interpreter runs on tensors of the CPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 is not a GPU's.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
EPS = 1e-6
# Sums are in another order, and 16-bit results may round the other way.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}
TRITON, PLAIN = TritonOperations(overlaps=can_overlap(DEVICE)), PlainOperations()


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 16), (3, 64), (5, 80), (2, 1024), (0, 32)])
@pytest.mark.parametrize(("has_update", "has_norm"), [(False, False), (True, False), (True, True)])
def test_add_norm(
    num_rows: int, size: int, has_update: bool, has_norm: bool, dtype: torch.dtype
) -> None:
    residual = numbers(num_rows, size, seed=1)
    update = numbers(num_rows, size, seed=2, dtype=dtype) if has_update else None
    update_norm = 1 + numbers(size, seed=3) if has_norm else None
    weight = 1 + numbers(size, seed=4)
    theirs = residual.clone()
    got = TRITON.add_norm(residual, update, update_norm, weight, eps=EPS, dtype=dtype)
    expected = PLAIN.add_norm(theirs, update, update_norm, weight, eps=EPS, dtype=dtype)
    assert got.dtype is dtype
    torch.testing.assert_close(got, expected, **TOLERANCES[dtype])
    torch.testing.assert_close(residual, theirs, **TOLERANCES[torch.float32])


def test_a_sum_is_scaled_and_needs_no_norm() -> None:
    residual, update, weight = numbers(3, 80, seed=1), numbers(3, 80, seed=2), numbers(80, seed=3)
    for own_update, own_weight in ((update, weight), (update, None), (None, weight), (None, None)):
        ours, theirs = residual.clone(), residual.clone()
        got, expected = (
            operations.add_norm(
                each, own_update, weight, own_weight, eps=EPS, dtype=torch.float32, scale=0.3
            )
            for operations, each in ((TRITON, ours), (PLAIN, theirs))
        )
        torch.testing.assert_close(got, expected, **TOLERANCES[torch.float32])
        torch.testing.assert_close(ours, theirs, **TOLERANCES[torch.float32])
        # What is only read stays.
        assert torch.equal(ours, residual) == (own_update is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("normed", "norms_projections"), [("", False), ("qk", False), ("qkv", False), ("qk", True)]
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_pairs"),
    [(4, 2, 16, 8), (3, 1, 48, 24), (2, 2, 80, 20), (1, 1, 128, 64), (20, 10, 32, 12)],
)
def test_rotate_and_store(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_pairs: int,
    normed: str,
    norms_projections: bool,
    dtype: torch.dtype,
) -> None:
    """Slots that are not written keep what they held; rows of padding are not stored."""
    num_tokens, num_slots = 5, 12
    qkv = numbers(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=1, dtype=dtype)
    angles = numbers(num_tokens, num_pairs, seed=2) * 3
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1) * 1.25
    num_normed = num_heads + num_kv_heads * (len(normed) - 1)
    head_norms = 1 + numbers(num_normed, head_dim, seed=3) if normed else None
    slots = torch.tensor([11, 0, 7, -1, 8], device=DEVICE)
    caches, marks, rotated = [], [], []
    for operations in (TRITON, PLAIN):
        cache = numbers(2, num_slots, num_kv_heads, head_dim, seed=4, dtype=dtype)
        is_bad = torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE)
        rotated.append(
            operations.rotate_and_store(
                qkv.clone(),
                cos_sin,
                head_norms,
                norms_projections=norms_projections,
                eps=EPS,
                keys=cache[0],
                values=cache[1],
                slot_mapping=slots,
                is_bad=is_bad,
            )
        )
        caches.append(cache)
        marks.append(is_bad)
    torch.testing.assert_close(rotated[0], rotated[1], **TOLERANCES[dtype])
    torch.testing.assert_close(caches[0], caches[1], **TOLERANCES[dtype])
    untouched = numbers(2, num_slots, num_kv_heads, head_dim, seed=4, dtype=dtype)
    others = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert torch.equal(caches[0][:, others], untouched[:, others])
    assert not marks[0].any()
    assert not marks[1].any()


def test_queries_alone_are_rotated() -> None:
    """Of a layer that attends to another one's K/V: nothing is written, no token is marked."""
    qkv, cos_sin = numbers(5, 4, 48, seed=1), numbers(5, 2, 24, seed=2)
    qkv[2, 1, 3] = math.inf
    nothing = qkv.new_empty(0, 0, 48)
    is_bad = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(5, device=DEVICE)
    norm = 1 + numbers(4, 48, seed=3)
    got, expected = (
        operations.rotate_and_store(
            qkv, cos_sin, norm, norms_projections=False, eps=EPS, keys=nothing, values=nothing,
            slot_mapping=slots, is_bad=is_bad,
        )
        for operations in (TRITON, PLAIN)
    )  # fmt: skip
    torch.testing.assert_close(got, expected, equal_nan=True, **TOLERANCES[torch.float32])
    assert not is_bad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operations", [TRITON, PLAIN])
def test_numbers_in_kv_that_are_not_finite_are_marked_and_stored_as_zero(
    operations: TritonOperations | PlainOperations, bad: float, dtype: torch.dtype
) -> None:
    """A token's own: of one head of keys, or of values; not of queries. Marks are kept."""
    num_tokens, head_dim = 6, 16
    cos_sin = torch.zeros(num_tokens, 2, 8, device=DEVICE)
    cos_sin[:, 0] = 1.0
    qkv = numbers(num_tokens, 6, head_dim, seed=1, dtype=dtype)
    for token, head in ((1, 0), (2, 2), (3, 3), (4, 5)):
        qkv[token, head, 9] = bad
    cache = numbers(2, 8, 2, head_dim, seed=2, dtype=dtype)
    is_bad = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    operations.rotate_and_store(
        qkv,
        cos_sin,
        None,
        norms_projections=False,
        eps=EPS,
        keys=cache[0],
        values=cache[1],
        slot_mapping=torch.arange(num_tokens, device=DEVICE),
        is_bad=is_bad,
    )
    assert is_bad.tolist() == [0, 0, 1, 1, 1, 1]
    assert cache.isfinite().all()
    # An infinity times a sine of zero is NaN for its partner, too.
    assert cache[0, 2, 0, 9] == cache[0, 3, 1, 9] == cache[1, 4, 1, 9] == 0
    assert torch.equal(cache[1, 4, 1, :9], qkv[4, 5, :9])


def test_keys_that_overflow_their_type_when_rotated_are_marked() -> None:
    cos_sin = torch.ones(1, 2, 8, device=DEVICE)
    qkv = torch.full((1, 3, 16), 50_000.0, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(2, 1, 1, 16, dtype=torch.float16, device=DEVICE)
    for operations in (TRITON, PLAIN):
        is_bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        operations.rotate_and_store(
            qkv.clone(),
            cos_sin,
            None,
            norms_projections=False,
            eps=EPS,
            keys=cache[0],
            values=cache[1],
            slot_mapping=slots,
            is_bad=is_bad,
        )
        assert is_bad.tolist() == [1]
        assert cache.isfinite().all()


def test_a_cache_may_have_more_values_than_int32_counts() -> None:
    """Of keys, and of values as many; here they are the same ones. 4 GiB, of which a host's memory
    holds those that are written.
    """
    num_heads, head_dim = 2, 128
    num_slots = 2**31 // (num_heads * head_dim) + 16
    cache = torch.empty(num_slots, num_heads, head_dim, dtype=torch.float16, device=DEVICE)
    cos_sin = torch.tensor([1.0, 0.0], device=DEVICE)[None, :, None].expand(2, 2, 64).contiguous()
    heads = numbers(2, num_heads, head_dim, seed=1, dtype=torch.float16)
    slots = torch.tensor([num_slots - 1, 3], device=DEVICE)
    TRITON.rotate_and_store(
        torch.cat((heads, heads, heads), dim=1),
        cos_sin,
        None,
        norms_projections=False,
        eps=EPS,
        keys=cache,
        values=cache,
        slot_mapping=slots,
        is_bad=torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )
    assert torch.equal(cache[slots], heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("shape", [(1, 16), (3, 40), (2, 1024), (2, 1500), (0, 16)])
def test_gate(activation: Activation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_rows, size = shape
    gate_up = numbers(num_rows, 2 * size, seed=1, dtype=dtype) * 4
    got = TRITON.gate(gate_up, activation)
    expected = PLAIN.gate(gate_up, activation)
    torch.testing.assert_close(got, expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_gate_of_ups_that_lie_elsewhere(activation: Activation, dtype: torch.dtype) -> None:
    gates, ups = (4 * numbers(3, 3, 40, seed=seed, dtype=dtype) for seed in (1, 2))
    got = TRITON.gate(gates[:, 0], activation, ups[:, 2])
    both = torch.cat((gates[:, 0], ups[:, 2]), dim=1)
    assert torch.equal(got, TRITON.gate(both, activation))
    assert torch.equal(PLAIN.gate(gates[:, 0], activation, ups[:, 2]), PLAIN.gate(both, activation))
