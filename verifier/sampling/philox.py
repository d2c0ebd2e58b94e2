"""Noise as a pure function of (seed, position, token): Philox4x32-10.

A sampled token depends on its sequence's seed, its absolute position and the model's distribution
there, and on nothing else: not on drafts, batch, chunking, or the replica that computes it. That
makes seeded output repeatable.

    key     (seed low 32 bits, seed high 32 bits)
    counter (token id, position, purpose, 0)
    uniform ((word0 * 2^20 + word1 >> 12) + 1/2) * 2^-52, in (0, 1)
    exponential -ln(uniform), float64

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11; the
constants are theirs, and their published known answers are this module's tests.
"""

import enum
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

P = ParamSpec("P")
R = TypeVar("R")

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_WORD_BITS = np.uint64(32)
_WORD_MASK = np.uint64(0xFFFFFFFF)


class Purpose(enum.IntEnum):
    """The use of a draw; part of the counter, so that no two uses share noise."""

    MATCH = 0
    ACCEPT = 1
    EMIT = 2


def uniforms(
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    purpose: Purpose,
) -> npt.NDArray[np.float64]:
    """Uniform variates in (0, 1).

    Args:
        seeds, positions, token_ids: [R]; the seed of the row's sequence, the absolute position of
            the token that the row samples, and the token that the draw is for (0: none).

    Returns:
        [R].
    """
    return _fill_uniform(
        seeds, positions.astype(np.uint32), token_ids.astype(np.uint32), np.uint32(purpose)
    )


def exponential_noise(
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    is_needed: npt.NDArray[np.bool_],
    purpose: Purpose = Purpose.MATCH,
) -> npt.NDArray[np.float64]:
    """Exponential variates of rate 1.

    Args:
        seeds: [R], the seed of the row's sequence.
        positions: [R], the absolute position of the token that the row samples.
        is_needed: [R, V], where noise is needed; elsewhere the result is 1.

    Returns:
        [R, V]; column v is token id v's noise.
    """
    return _fill_exponential(seeds, positions.astype(np.uint32), is_needed, np.uint32(purpose))


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function`, at its first call with new argument types, to code that runs without the
    interpreter lock.

    The machine code is cached on disk, where numba finds a folder that it may write to; elsewhere,
    as in a read-only container, every process compiles anew. A kernel must stand in the same file
    as the kernels that it calls: numba invalidates its cache when that one file changes.
    """
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return cast(Callable[P, R], compiled)


@kernel
def philox4x32(
    counter_0: np.uint32,
    counter_1: np.uint32,
    counter_2: np.uint32,
    counter_3: np.uint32,
    key_0: np.uint32,
    key_1: np.uint32,
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """One block of four 32-bit words: ten rounds."""
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * np.uint64(counter_0)
        product_1 = _MULTIPLIER_1 * np.uint64(counter_2)
        counter_0 = np.uint32(product_1 >> _WORD_BITS) ^ counter_1 ^ key_0
        counter_1 = np.uint32(product_1 & _WORD_MASK)
        counter_2 = np.uint32(product_0 >> _WORD_BITS) ^ counter_3 ^ key_1
        counter_3 = np.uint32(product_0 & _WORD_MASK)
        key_0 = np.uint32(key_0 + _WEYL_0)
        key_1 = np.uint32(key_1 + _WEYL_1)
    return counter_0, counter_1, counter_2, counter_3


@kernel
def _uniform(
    token_id: np.uint32,
    position: np.uint32,
    purpose: np.uint32,
    key_0: np.uint32,
    key_1: np.uint32,
) -> float:
    word_0, word_1, _, _ = philox4x32(token_id, position, purpose, np.uint32(0), key_0, key_1)
    bits = (np.uint64(word_0) << np.uint64(20)) | np.uint64(word_1 >> np.uint32(12))
    return (np.float64(bits) + 0.5) * 2.0**-52


@kernel
def _fill_exponential(
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint32],
    is_needed: npt.NDArray[np.bool_],
    purpose: np.uint32,
) -> npt.NDArray[np.float64]:
    num_rows, vocab_size = is_needed.shape
    noise = np.ones((num_rows, vocab_size), dtype=np.float64)
    for row in range(num_rows):
        key_0 = np.uint32(seeds[row] & _WORD_MASK)
        key_1 = np.uint32(seeds[row] >> _WORD_BITS)
        for token_id in range(vocab_size):
            if is_needed[row, token_id]:
                uniform = _uniform(np.uint32(token_id), positions[row], purpose, key_0, key_1)
                noise[row, token_id] = -math.log(uniform)
    return noise


@kernel
def _fill_uniform(
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint32],
    token_ids: npt.NDArray[np.uint32],
    purpose: np.uint32,
) -> npt.NDArray[np.float64]:
    drawn = np.empty(len(seeds), dtype=np.float64)
    for row in range(len(seeds)):
        key_0 = np.uint32(seeds[row] & _WORD_MASK)
        key_1 = np.uint32(seeds[row] >> _WORD_BITS)
        drawn[row] = _uniform(token_ids[row], positions[row], purpose, key_0, key_1)
    return drawn
