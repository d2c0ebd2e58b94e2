"""The noise: Philox's published known answers, purity, distribution, and its compilation."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from tests.verifier.sampling.goodness_of_fit import kolmogorov_smirnov
from verifier.sampling.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        pytest.param(
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
            id="zeros",
        ),
        pytest.param(
            (ONES, ONES, ONES, ONES),
            (ONES, ONES),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
            id="ones",
        ),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="pi",
        ),
    ],
)
def test_published_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert block(counter, key) == words


def block(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = np.empty((4, 1), dtype=np.uint64)
    b, c, d, key_0, key_1 = (np.uint64(word) for word in (*counter[1:], *key))
    philox4x32(np.array(counter[:1]), b, c, d, key_0, key_1, words)
    return tuple(words[:, 0].tolist())


def noise_of(
    seeds: list[int],
    positions: list[int],
    vocab_size: int = 50,
) -> npt.NDArray[np.float64]:
    """Exponential variates [len(seeds), vocab_size] of all tokens."""
    drawn = uniforms(
        np.repeat(np.array(seeds, dtype=np.uint64), vocab_size),
        np.repeat(np.array(positions, dtype=np.int64), vocab_size),
        np.tile(np.arange(vocab_size), len(seeds)),
    )
    noise: npt.NDArray[np.float64] = -np.log(drawn).reshape(len(seeds), vocab_size)
    return noise


def test_noise_follows_the_counter_layout() -> None:
    seed, position, token_id = 0x299F31D0_A4093822, 1234, 17
    word_0, word_1, _, _ = block((token_id, position, 0, 0), (0xA4093822, 0x299F31D0))
    uniform = ((int(word_0) << 20 | int(word_1) >> 12) + 0.5) / 2**52
    [drawn] = uniforms(
        np.array([seed], dtype=np.uint64), np.array([position]), np.array([token_id])
    )
    assert drawn == uniform


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_noise_is_exponential_along_every_axis(axis: str) -> None:
    count = 50_000
    match axis:
        case "token":
            noise = noise_of([3], [11], vocab_size=count)[0]
        case "position":
            noise = noise_of([3] * count, list(range(count)), vocab_size=1)[:, 0]
        case _:
            noise = noise_of(list(range(count)), [11] * count, vocab_size=1)[:, 0]
    assert (noise > 0).all()
    assert np.isfinite(noise).all()
    ascending = np.sort(noise)
    assert kolmogorov_smirnov(ascending, 1 - np.exp(-ascending)) < 1.95
    neighbours = np.corrcoef(np.exp(-noise[:-1]), np.exp(-noise[1:]))[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(count)
