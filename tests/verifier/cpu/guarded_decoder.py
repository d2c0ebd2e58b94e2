"""Runs a decoder whose arrays end at pages that nobody may touch: what leaves one ends the process.

    python -m tests.verifier.cpu.guarded_decoder FOLDER:DTYPE:QUANTIZATION:THREADS ...

Every array that kernels get ends right before such a page, without the room that a decoder leaves
at the ends of rows, and starts after a page that nobody may touch and a margin with a pattern,
which is compared at the end. Layouts are as large as the decoder was made for.
"""

import ctypes
import dataclasses
import mmap
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

import servicekit.kernels.memory as memory
import verifier.batch.slot_lengths as lengths_module
import verifier.cpu.decoder as decoder_module
import verifier.cpu.layout_checks as layout_module
import verifier.cpu.states as states_module
from servicekit.logs import configure_logs
from tests.verifier.chunks import Chunk
from tests.verifier.cpu.running_decoder import Array, RunningDecoder, load, some_tokens
from tests.verifier.cpu.state_walk import NUM_SLOTS, Walk
from tests.volume import cases
from verifier.checkpoint.weight_types import Rotary
from verifier.cpu.weights import (
    BesideMlp,
    DecoderWeights,
    DeltaNet,
    Experts,
    Layer,
    LayerInput,
    Matrix,
    Part,
    PerLayerInputs,
)

MAX_NUM_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 70, 12, 32
# Where a model has recurrent states.
MAX_DRAFTS = 5
WEIGHTS = (
    BesideMlp, DecoderWeights, DeltaNet, Experts, Layer, LayerInput, Matrix, Part, PerLayerInputs,
    Rotary,
)  # fmt: skip
PATTERN = 0xA5
PAGE = mmap.PAGESIZE
_c_library = ctypes.CDLL(None, use_errno=True)


class Guards:
    """Memory of arrays. It is never given back."""

    def __init__(self) -> None:
        self._margins: list[Array] = []
        self._regions: list[tuple[int, int, Any]] = []

    def empty(self, shape: Any, dtype: Any = np.float64) -> Array:
        """An array, filled with the pattern, that ends where a guarded page begins."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        num_pages = max(1, -(-size // PAGE))
        region = mmap.mmap(-1, (num_pages + 2) * PAGE)
        bytes_ = np.frombuffer(region, dtype=np.uint8)
        first = int(bytes_.ctypes.data)
        bytes_[:] = PATTERN
        for page in (first, first + (num_pages + 1) * PAGE):
            if _c_library.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        end = (num_pages + 1) * PAGE
        self._margins.append(bytes_[PAGE : end - size])
        self._regions.append((first + PAGE, first + end, region))
        own: Array = bytes_[end - size : end].view(dtype).reshape(shape)
        return own

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Array:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def copy(self, array: Array) -> Array:
        own = self.empty(array.shape, array.dtype)
        own[...] = array
        return own

    def concatenate(self, arrays: Any) -> Array:
        return self.copy(np.concatenate(arrays))

    def repeat(self, array: Array, count: int) -> Array:
        return self.copy(np.repeat(array, count))

    def address_of(self, array: Array) -> int:
        """Of the array, or of a guarded copy of one that is only read."""
        address = memory.address_of(array)
        if array.nbytes and not any(start <= address < end for start, end, _ in self._regions):
            return memory.address_of(self.copy(array))
        return address

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self._regions)

    def check(self) -> None:
        """Asserts that nothing was written to the margins before the arrays."""
        assert all((margin == PATTERN).all() for margin in self._margins), "a margin was written to"


class GuardedNumpy:
    """numpy, as the decoder and its layouts see it."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards

    def __getattr__(self, name: str) -> Any:
        own = {"zeros", "empty", "concatenate", "repeat"}
        return getattr(self._guards if name in own else np, name)


def guarded(guards: Guards, value: Any) -> Any:
    """A copy of weights in guarded memory."""
    if isinstance(value, np.ndarray):
        return guards.copy(value)
    if isinstance(value, list):
        return [guarded(guards, each) for each in value]
    if isinstance(value, WEIGHTS):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value)(**{name: guarded(guards, each) for name, each in fields.items()})
    return value


def all_choose_the_same(weights: DecoderWeights) -> DecoderWeights:
    """Equal logits of the router: every token's experts are the first ones."""
    layers = []
    for layer in weights.layers:
        experts = layer.experts
        if experts is not None:
            router = experts.router
            parts = [Part(blocks=np.zeros_like(router.blocks))]
            router = dataclasses.replace(router, parts=parts)
            experts = dataclasses.replace(experts, router=router)
        layers.append(dataclasses.replace(layer, experts=experts))
    return dataclasses.replace(weights, layers=layers)


def tight(size: int) -> int:
    """Floats from row to row, without a decoder's spare ones."""
    return -(-size // 16) * 16


def some_batches(vocab_size: int, draw: random.Random) -> list[list[Chunk]]:
    """Steps of full size: one long sequence, many single tokens at the cache's end, random ones."""
    length = NUM_BLOCKS * BLOCK_SIZE
    table = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    # The largest id first and last.
    tokens = [vocab_size - 1, *some_tokens(length - 2, vocab_size), vocab_size - 1]

    def chunk(start: int, size: int, num_rows: int) -> Chunk:
        return Chunk(
            token_ids=tokens[start : start + size],
            start=start,
            block_table=table,
            num_rows=num_rows,
        )

    batches = [
        [chunk(start, min(MAX_NUM_TOKENS, length - start), 1)]
        for start in range(0, length, MAX_NUM_TOKENS)
    ]
    batches.append([chunk(length - MAX_NUM_TOKENS, MAX_NUM_TOKENS, MAX_NUM_TOKENS)])
    batches.append([chunk(length - 1, 1, 1)] * MAX_NUM_TOKENS)
    batches.append([chunk(0, 1, 1)] * MAX_NUM_TOKENS)
    for _ in range(cases(8, 25)):
        room, batch = MAX_NUM_TOKENS, []
        while room:
            size = min(room, draw.choice([1, draw.randint(1, 20), draw.randint(1, room)]))
            start = draw.choice([0, length - size, draw.randint(0, length - size)])
            batch.append(chunk(start, size, draw.choice([0, 1, size])))
            room -= size
        batches.append(batch)
    return batches


def some_walk(vocab_size: int, draw: random.Random) -> list[list[Chunk]]:
    """Steps of a model with recurrent states, which go on where they are."""
    walk = Walk(
        some_tokens(128, vocab_size), draw, vocab_size=vocab_size, max_num_tokens=MAX_NUM_TOKENS,
        max_drafts=MAX_DRAFTS, num_blocks=NUM_BLOCKS,
    )  # fmt: skip
    return [[chunk for chunk, _ in step] for step in walk.steps(cases(20, 60))]


def run(folder: str, dtype: str, quantization: str, num_threads: str) -> None:
    """Compares each step's logits with those of a decoder without guards."""
    guards = Guards()
    plain = load(Path(folder), dtype, quantization)
    sizes: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_num_tokens": MAX_NUM_TOKENS,
    }
    batches_of = some_batches
    if plain.delta is not None:
        batches_of = some_walk
        sizes |= {"num_state_slots": NUM_SLOTS, "max_drafts": MAX_DRAFTS}
    routed = any(layer.experts is not None for layer in plain.layers)
    for weights in (plain, all_choose_the_same(plain)) if routed else (plain,):
        batches = batches_of(weights.vocab_size, random.Random(9))
        with RunningDecoder(weights, **sizes) as running:
            expected = [running.run(*batch) for batch in batches]
        kept = {each: getattr(decoder_module, each) for each in ("np", "address_of", "_stride")}
        vars(decoder_module).update(
            np=GuardedNumpy(guards), address_of=guards.address_of, _stride=tight
        )
        for module in (layout_module, lengths_module, states_module):
            vars(module).update(np=GuardedNumpy(guards))
        own = guarded(guards, weights)
        with RunningDecoder(own, num_threads=int(num_threads), **sizes) as running:
            for batch, rows in zip(batches, expected, strict=True):
                for ours, other in zip(running.run(*batch), rows, strict=True):
                    np.testing.assert_array_equal(ours, other)
        vars(decoder_module).update(kept)
        for module in (layout_module, lengths_module, states_module):
            vars(module).update(np=np)
    guards.check()
    print(len(guards), "arrays")


if __name__ == "__main__":
    configure_logs("info", "tests")
    for subject in sys.argv[1:]:
        print(subject, file=sys.stderr, flush=True)
        run(*subject.split(":"))
