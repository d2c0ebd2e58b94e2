"""Single steps, as the engine launches them, and one layer's attention."""

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.report import Goal, Measure
from benchmarks.shapes import first_layers
from benchmarks.turns import Variant, blocking
from verifier.attention.backend import AttendsToTables
from verifier.attention.kv_cache import KVCache, KVShape, block_bytes
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.batch.target_model import TargetModel
from verifier.gpu.attention.selection import AttentionChoice, choose_attention, make_backend
from verifier.gpu.graph_pool import CudaCapture
from verifier.sampling import Sampling
from verifier.sampling.logits_processing import History
from verifier.sampling.rejection_sampler import JudgedSequence

DECODE_GOAL = 1.25
VERIFY_GOALS = {1: 1.1, 8: 1.2, 32: 1.6}
KERNEL_GOAL = 0.7
NUM_DRAFTS = 8
LONG_DRAFTS = 31
_SMALLEST_BLOCK = 16
# Of a step: block tables of sequences of other lengths have other ids.
_MOST_SEQUENCES = 1000


async def measure_decode(bench: Bench) -> AsyncIterator[Measure]:
    """A decode step over the time to read weights and K/V once at the speed of a copy."""
    shape = bench.size.large
    _, loaded = bench.loaded(shape)
    config = shape.config()
    layout = step_layout(
        [(bench.size.context, 1)], loaded.served.block_size, loaded.served.num_kv_blocks
    )
    kv = _kv_shape(config, config.num_hidden_layers, bench.size.dtype)
    weights_bytes = shape.step_weights_bytes(bench.size.dtype.itemsize)
    read_bytes = weights_bytes + block_bytes(kv, 1) * bench.size.context
    step = _step(bench, f"step, {shape.name}", layout, loaded.model)
    copy = bench.copying()
    await bench.compare(step, copy)
    floors = [
        step_s * speed / read_bytes
        for step_s, speed in zip(step.figures, copy.figures, strict=True)
    ]
    yield bench.measure(
        "decode",
        f"step of {shape.name} at {bench.size.context} tokens / its floor",
        1,
        floors,
        Goal(value=DECODE_GOAL, is_most=True),
        f"{step.median * 1e3:.3g} ms; {read_bytes / 1e9:.3g} GB, copied at "
        f"{copy.median / 1e9:,.4g} GB/s; attention: {loaded.served.attention_backend}",
    )


async def measure_verify(bench: Bench) -> AsyncIterator[Measure]:
    """A step that verifies drafts over a plain one."""
    shape = bench.size.large
    _, loaded = bench.loaded(shape)
    served = loaded.served
    for batch in bench.size.batches:
        plain, verifying = (
            _step(
                bench,
                f"{rows} rows each",
                step_layout(
                    [(bench.size.context, rows)] * batch, served.block_size, served.num_kv_blocks
                ),
                loaded.model,
            )
            for rows in (1, 1 + NUM_DRAFTS)
        )
        await bench.compare(verifying, plain)
        goal = VERIFY_GOALS.get(batch)
        yield bench.ratio(
            "verify",
            f"step of {shape.name} with {NUM_DRAFTS} drafts each / without",
            verifying,
            plain,
            None if goal is None else Goal(value=goal, is_most=True),
        )


async def measure_long(bench: Bench) -> AsyncIterator[Measure]:
    """A step at the end of a long text that verifies drafts over a plain one."""
    size = bench.size
    shape = first_layers(size.large, 2, max_position_embeddings=size.long_model_len)
    batches = {1: LONG_DRAFTS, 4: NUM_DRAFTS}
    _, loaded = bench.loaded(
        shape,
        max_model_len=size.long_model_len,
        num_kv_blocks=size.long_model_len // _SMALLEST_BLOCK,
    )
    served = loaded.served
    for batch, num_drafts in batches.items():
        # In either case as much K/V is read.
        length = size.long_context // batch
        plain, verifying = (
            _step(
                bench,
                f"{rows} rows each of {length} tokens",
                step_layout([(length, rows)] * batch, served.block_size, served.num_kv_blocks),
                loaded.model,
            )
            for rows in (1, 1 + num_drafts)
        )
        await bench.compare(verifying, plain)
        yield bench.ratio(
            "long",
            f"step of {shape.name} at {length} tokens with {num_drafts} drafts each / without",
            verifying,
            plain,
            note=f"longest length {size.long_model_len}",
        )


async def measure_kernel(bench: Bench) -> AsyncIterator[Measure]:
    """One layer's attention by the backend that `auto` chooses, with the writing of new K/V: bytes
    of K/V per second over those of a copy.
    """
    batch, length = bench.size.kernel
    sequences = [(length, 1)] * batch
    config = bench.size.large.config()
    kv = _kv_shape(config, 1, bench.size.dtype)
    choice = choose_attention(
        "auto", device=bench.device, dtype=bench.size.dtype, head_dim=kv.head_dim
    )
    attend = _attending(bench, kv, int(config.num_attention_heads), choice, sequences)
    copy = bench.copying()
    await bench.compare(attend, copy)
    read_bytes = block_bytes(kv, 1) * sum(length for length, _ in sequences)
    yield bench.measure(
        "kernel",
        f"attention to {length} tokens, {choice.name}: K/V per second / copy",
        batch,
        [
            read_bytes / attend_s / speed
            for attend_s, speed in zip(attend.figures, copy.figures, strict=True)
        ],
        Goal(value=KERNEL_GOAL),
        f"{attend.median * 1e6:,.4g} us a layer; copy at {copy.median / 1e9:,.4g} GB/s",
    )


def _attending(
    bench: Bench,
    kv: KVShape,
    num_heads: int,
    choice: AttentionChoice,
    sequences: Sequence[tuple[int, int]],
) -> Variant:
    num_blocks = sum(-(-length // choice.block_size) for length, _ in sequences)
    cache = KVCache(kv, num_blocks=num_blocks, block_size=choice.block_size, device=bench.device)
    layout = step_layout(sequences, choice.block_size, num_blocks)
    backend = make_backend(choice, device=bench.device)
    size = (layout.num_tokens, kv.head_dim)

    def random(num_heads: int) -> torch.Tensor:
        return torch.randn((num_heads, *size), dtype=bench.size.dtype, device=bench.device)

    queries, keys, values = (
        random(heads) for heads in (num_heads, kv.num_kv_heads, kv.num_kv_heads)
    )
    with torch.inference_mode():
        step = backend.prepare(layout, cache)

    @torch.inference_mode()
    def attend() -> None:
        cache.begin_step()
        step.attend(
            0,
            queries,
            keys,
            values,
            scaling=kv.head_dim**-0.5,
            sliding_window=None,
        )

    attend()  # compiles
    run: Callable[[], object] = attend
    if bench.device.type == "cuda" and isinstance(backend, AttendsToTables):
        # As in a decoder's step: the host takes longer to launch it.
        run = CudaCapture(bench.device)(attend).replay
    return blocking(choice.name, len(sequences), lambda: bench.seconds(run), unit="s")


def step_layout(
    sequences: Sequence[tuple[int, int]], block_size: int, num_blocks: int
) -> BatchLayout:
    """A step of sequences, each with its length and its rows, the first its token, others drafts.

    Their blocks are apart as long as there are enough. A model knows the block tables of a layout
    from another one whose sequences have the same lengths.
    """
    scheduled, used = [], 0
    for nth, (length, rows) in enumerate(sequences):
        needed = -(-length // block_size)
        scheduled.append(
            ScheduledTokens(
                token_ids=[1],
                draft_token_ids=[2 + row % 7 for row in range(rows - 1)],
                num_computed_tokens=length - rows,
                block_table=[(used + block) % num_blocks for block in range(needed)],
                table_id=length * _MOST_SEQUENCES + nth,
            )
        )
        used += needed
    return lay_out(scheduled, block_size=block_size)


def _step(bench: Bench, name: str, layout: BatchLayout, model: TargetModel) -> Variant:
    """A step of the model, with greedy verification of its drafts; seconds."""
    drafts = np.split(layout.draft_token_ids, np.cumsum(layout.num_draft_tokens)[:-1])
    sequences = [
        JudgedSequence(
            sampling=Sampling(),
            history=History(draft_token_ids=own.tolist()),
            first_position=int(length) - len(own),
        )
        for own, length in zip(drafts, layout.seq_lens, strict=True)
    ]

    def step() -> None:
        handle = model.launch(layout, sequences)
        handle.wait()
        handle.result()

    return blocking(name, len(layout.seq_lens), lambda: bench.seconds(step), unit="s")


def _kv_shape(config: object, num_layers: int, dtype: torch.dtype) -> KVShape:
    return KVShape(
        num_layers=num_layers,
        num_kv_heads=int(getattr(config, "num_key_value_heads")),  # noqa: B009
        head_dim=int(getattr(config, "head_dim")),  # noqa: B009
        dtype=dtype,
    )
