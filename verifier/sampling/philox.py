"""Noise as a pure function of (seed, position, token): Philox4x32-10.

A sampled token depends on its sequence's seed, its absolute position and the model's distribution
there, and on nothing else: not on drafts, batch, chunking, or the replica that computes it. That
makes seeded output repeatable.

    key     (seed low 32 bits, seed high 32 bits)
    counter (token id, position, 0, 0)
    uniform ((word0 * 2^20 + word1 >> 12) + 1/2) * 2^-52, in (0, 1)
    exponential -ln(uniform), float64

Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11; the
constants are theirs, and their published known answers are this module's tests.
"""

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from verifier.sampling.bits import from_bits

DoubleArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]
WordArray = npt.NDArray[np.uint64]

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_WORD_BITS = np.uint64(32)
_WORD_MASK = np.uint64(0xFFFFFFFF)
_WORD_0_SHIFT = np.uint64(20)
_WORD_1_SHIFT = np.uint64(12)
_BITS_OF_1 = np.uint64(0x3FF0000000000000)


@kernel
def philox4x32(
    counters_0: IntArray,
    counter_1: np.uint64,
    counter_2: np.uint64,
    counter_3: np.uint64,
    key_0: np.uint64,
    key_1: np.uint64,
    words: WordArray,
) -> None:
    """Blocks of four 32-bit words, ten rounds each.

    Blocks are computed many at a time, as vectors, in a third of the time. For that, words are
    64 bits wide, and there is no call within the loop.

    Args:
        counters_0: [n], of which the low 32 bits count.
        words: [4, n or more], overwritten; contiguous.
    """
    for i in range(len(counters_0)):
        a, b = np.uint64(counters_0[i]) & _WORD_MASK, counter_1
        c, d = counter_2, counter_3
        round_key_0, round_key_1 = key_0, key_1
        for _ in range(10):
            product_0 = _MULTIPLIER_0 * a
            product_1 = _MULTIPLIER_1 * c
            a = (product_1 >> _WORD_BITS) ^ b ^ round_key_0
            b = product_1 & _WORD_MASK
            c = (product_0 >> _WORD_BITS) ^ d ^ round_key_1
            d = product_0 & _WORD_MASK
            round_key_0 = (round_key_0 + _WEYL_0) & _WORD_MASK
            round_key_1 = (round_key_1 + _WEYL_1) & _WORD_MASK
        words[0, i], words[1, i], words[2, i], words[3, i] = a, b, c, d


@kernel
def fill_uniforms(
    token_ids: IntArray,
    position: int,
    seed: np.uint64,
    words: WordArray,
    result: DoubleArray,
) -> None:
    """Uniform variates of some tokens [n] at one position.

    Args:
        words: as of `philox4x32`, for its use. result: [n], overwritten.
    """
    philox4x32(
        token_ids,
        np.uint64(position) & _WORD_MASK,
        np.uint64(0),
        np.uint64(0),
        seed & _WORD_MASK,
        seed >> _WORD_BITS,
        words,
    )
    for i in range(len(token_ids)):
        bits = (words[0, i] << _WORD_0_SHIFT) | (words[1, i] >> _WORD_1_SHIFT)
        # In [1, 2), then less 1: quicker than a conversion, and exact.
        result[i] = from_bits(np.int64(bits | _BITS_OF_1)) - 1.0 + 2.0**-53


@kernel
def uniform(token_id: int, position: int, seed: np.uint64) -> np.float64:
    result, token_ids = np.empty(1), np.empty(1, dtype=np.int64)
    token_ids[0] = token_id
    fill_uniforms(token_ids, position, seed, np.empty((4, 1), dtype=np.uint64), result)
    drawn: np.float64 = result[0]
    return drawn


@kernel
def uniforms(seeds: WordArray, positions: IntArray, token_ids: IntArray) -> DoubleArray:
    """Uniform variates in (0, 1).

    Args:
        seeds, positions, token_ids: [R]; the seed of the row's sequence, the absolute position of
            the token that the row samples, and the token that the draw is for.

    Returns:
        [R].
    """
    drawn, words = np.empty(len(seeds)), np.empty((4, 1), dtype=np.uint64)
    for row in range(len(seeds)):
        one = slice(row, row + 1)
        fill_uniforms(token_ids[one], positions[row], seeds[row], words, drawn[one])
    return drawn
