"""What must hold of the `triton` backend, on any device: in Triton's interpreter, and on a GPU.

The oracle is attention by definition, in float64, one row after another.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from tests.verifier.paged_model import PagedModel, make_small_model
from tests.verifier.triton.triton_interpreter import interpreted_cases
from verifier.attention.backend import AttentionBackend, DeviceTables, device_tables
from verifier.attention.kv_cache import KVCache, KVShape
from verifier.attention.sdpa import SdpaBackend
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.gpu.attention.tiles import LARGE_TILES, SMALL_STEP_TOKENS, Splitting
from verifier.gpu.attention.triton_backend import TritonBackend
from verifier.gpu.attention.triton_paged import paged_attention, write

# Each program reads all splits of its rows; and each one split only. Splits far shorter than the
# sequences here, unlike the default: from 32 tokens for the first two to 128.
TOGETHER = Splitting(split_tokens=32, equal_splits=2, enough_programs=0)
APART = Splitting(split_tokens=32, equal_splits=2, enough_programs=1 << 30)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Of results with values near 1: some roundings of the result's type."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One sequence's share of a step: the last `num_queries` of its `length` tokens."""

    num_queries: int
    length: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class World:
    """Sequences' whole K/V and queries, and a cache with what the step's tokens do not write.

    What no sequence may read is NaN: other blocks, and blocks past a sequence's end.
    """

    def __init__(self, sizes: Sizes, entries: SequenceOf[Entry], *, seed: int = 0) -> None:
        self.sizes = sizes
        self.entries = entries
        self.device = torch.device(sizes.device)
        self.texts = [self._text(entry) for entry in entries]
        draw = random.Random(seed)
        num_blocks = [-(-entry.length // sizes.block_size) for entry in entries]
        total = sum(num_blocks) + 3
        free = draw.sample(range(total), total)
        self.tables = [[free.pop() for _ in range(count)] for count in num_blocks]
        shape = KVShape(
            num_layers=2,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=sizes.dtype,
        )
        self.cache = KVCache(
            shape, num_blocks=total, block_size=sizes.block_size, device=self.device
        )
        for blocks in self.cache.blocks(1):
            blocks.fill_(torch.nan)
        layout = lay_out(
            [
                ScheduledTokens(
                    token_ids=[0] * entry.length,
                    draft_token_ids=[],
                    num_computed_tokens=0,
                    block_table=table,
                )
                for entry, table in zip(entries, self.tables, strict=True)
                if entry.length
            ],
            block_size=sizes.block_size,
        )
        slots = torch.from_numpy(layout.slot_mapping).to(self.device)
        _, keys, values = (torch.cat(each, dim=1) for each in zip(*self.texts, strict=True))
        self.cache.write(1, keys, values, slots)
        self.layout = self._layout()
        # What the step itself writes is not there yet.
        for blocks in self.cache.blocks(1):
            new = torch.from_numpy(self.layout.slot_mapping).to(self.device)
            blocks.view(-1, sizes.num_kv_heads, sizes.head_dim)[new] = torch.nan

    def _text(self, entry: Entry) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values [heads, length, head_dim] of the whole sequence."""
        generator = torch.Generator().manual_seed(1000 * entry.seed + entry.length)
        sizes = self.sizes
        return tuple(
            torch.randn((heads, entry.length, sizes.head_dim), generator=generator)
            .to(sizes.dtype)
            .to(self.device)
            for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
        )

    def _layout(self) -> BatchLayout:
        real = [i for i, entry in enumerate(self.entries) if entry.num_queries]
        layout = lay_out(
            [
                ScheduledTokens(
                    token_ids=[0] * self.entries[i].num_queries,
                    draft_token_ids=[],
                    num_computed_tokens=self.entries[i].length - self.entries[i].num_queries,
                    block_table=self.tables[i],
                )
                for i in real
            ],
            block_size=self.sizes.block_size,
        )
        return dataclasses.replace(
            layout,
            cu_seqlens_q=np.cumsum([0, *(entry.num_queries for entry in self.entries)]),
            seq_lens=np.array([entry.length for entry in self.entries]),
            block_tables=self.tables,
        )

    def rows(self) -> list[torch.Tensor]:
        """The step's queries, keys and values [heads, T, head_dim]."""
        return [
            torch.cat(
                [
                    text[which][:, entry.length - entry.num_queries :]
                    for entry, text in zip(self.entries, self.texts, strict=True)
                ],
                dim=1,
            )
            for which in range(3)
        ]

    def attend(
        self,
        splitting: Splitting,
        *,
        sliding_window: int | None = None,
        scaling: float = 0.3,
        is_strict: bool = False,
    ) -> torch.Tensor:
        backend = TritonBackend(device=self.device, splitting=splitting, is_strict=is_strict)
        return self.attend_by(backend, sliding_window=sliding_window, scaling=scaling)

    def attend_by(
        self, backend: AttentionBackend, *, sliding_window: int | None, scaling: float
    ) -> torch.Tensor:
        step = backend.prepare(self.layout, self.cache)
        queries, keys, values = self.rows()
        return step.attend(1, queries, keys, values, scaling=scaling, sliding_window=sliding_window)

    def exact(
        self,
        *,
        sliding_window: int | None = None,
        scaling: float = 0.3,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The definition, in float64: [T, num_heads, head_dim]."""
        rows = []
        for entry, text in zip(self.entries, self.texts, strict=True):
            queries, keys, values = (each.double() for each in text)
            for at in range(entry.length - entry.num_queries, entry.length):
                first = 0 if sliding_window is None else max(0, at - sliding_window + 1)
                of_heads = []
                for head in range(self.sizes.num_heads):
                    kv_head = head // self.sizes.group
                    scores = keys[kv_head, first : at + 1] @ queries[head, at] * scaling
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat((scores, sinks[head : head + 1].double()))
                    weights = scores.softmax(0)[: at + 1 - first]
                    of_heads.append(weights @ values[kv_head, first : at + 1])
                rows.append(torch.stack(of_heads))
        return torch.stack(rows)

    def check(self, attended: torch.Tensor, *, sliding_window: int | None = None) -> None:
        tolerance = TOLERANCES[self.sizes.dtype]
        torch.testing.assert_close(
            attended.double(),
            self.exact(sliding_window=sliding_window),
            rtol=tolerance,
            atol=tolerance,
        )


def random_world(
    seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", is_small: bool = False
) -> tuple[World, int | None]:
    """Any mixture of decodes, drafts and chunks, and a window or none.

    `is_small`: no more tokens than a step of small tiles has.
    """
    draw = random.Random(seed)
    sizes = Sizes(
        num_kv_heads=draw.choice([1, 2, 3]),
        group=draw.randint(1, 8),
        head_dim=draw.choice([16, 40, 64, 80, 96, 128]),
        block_size=draw.choice([16, 32, 64]),
        dtype=dtype,
        device=device,
    )
    entries: list[Entry] = []
    for nth in range(draw.randint(1, 4)):
        num_queries = draw.choice([0, 1, 1, draw.randint(2, 9), draw.randint(10, 60)])
        if is_small:
            num_queries = min(num_queries, draw.choice([1, 4]), 7 - sum_of_queries(entries))
        computed = draw.choice([0, draw.randint(1, 70), draw.randint(70, 200)])
        entries.append(Entry(num_queries=num_queries, length=computed + num_queries, seed=nth))
    entries.append(Entry(num_queries=1, length=draw.randint(1, 150), seed=9))
    return World(sizes, entries, seed=seed), draw.choice([None, 1, 20, 50, 300])


def sum_of_queries(entries: SequenceOf[Entry]) -> int:
    return sum(entry.num_queries for entry in entries)


def attention_is_that_of_the_definition(
    seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    for splitting, is_small in itertools.product((TOGETHER, APART), (False, True)):
        world, sliding_window = random_world(seed, dtype=dtype, device=device, is_small=is_small)
        if is_small:
            assert sum_of_queries(world.entries) <= SMALL_STEP_TOKENS
        world.check(
            world.attend(splitting, sliding_window=sliding_window), sliding_window=sliding_window
        )


def shapes_of_tiles(dtype: torch.dtype) -> tuple[bool, ...]:
    """What `is_strict` must be to get each of them, in a small step."""
    return (False,) if dtype is torch.float32 else (False, True)


def the_default_splits_are_right(dtype: torch.dtype, device: str = "cpu") -> None:
    """Longer than one split of the default, in blocks of every size."""
    for block_size in (16, 256):
        sizes = Sizes(head_dim=64, dtype=dtype, device=device, block_size=block_size)
        entries = [Entry(num_queries=3, length=1100), Entry(num_queries=5, length=600)]
        for sliding_window, is_strict in itertools.product((None, 560), shapes_of_tiles(dtype)):
            world = World(sizes, entries)
            attended = world.attend(Splitting(), sliding_window=sliding_window, is_strict=is_strict)
            world.check(attended, sliding_window=sliding_window)


def a_softcap_is_that_of_the_definition(dtype: torch.dtype, device: str = "cpu") -> None:
    """Scores far over the cap, and near zero; in K/V that the model has written."""
    sizes = Sizes(num_kv_heads=2, group=3, head_dim=40, dtype=dtype, device=device)
    num_queries = interpreted_cases(5, 20)
    entries = [Entry(num_queries=3, length=90), Entry(num_queries=num_queries, length=61)]
    for scaling in (0.01, 30.0):
        for splitting, window in ((TOGETHER, 25), (APART, None)):
            world = World(sizes, entries)
            TritonBackend(device=world.device, splitting=splitting).prepare(
                world.layout, world.cache
            ).attend(1, *world.rows(), scaling=1.0, sliding_window=None)  # writes K/V
            before = [blocks.clone() for blocks in world.cache.blocks(1)]
            world.cache.is_written_by_attention = False
            queries, keys, values = world.rows()
            attended = (
                TritonBackend(device=world.device, splitting=splitting)
                .prepare(world.layout, world.cache)
                .attend(
                    1, queries, 9 * keys, 9 * values, scaling=scaling, sliding_window=window,
                    softcap=5.0,
                )
            )  # fmt: skip
            expected = world.exact(sliding_window=window, scaling=scaling, softcap=5.0)
            tolerance = TOLERANCES[dtype]
            torch.testing.assert_close(attended.double(), expected, rtol=tolerance, atol=tolerance)
            for blocks, old in zip(world.cache.blocks(1), before, strict=True):
                assert torch.equal(blocks.nan_to_num(), old.nan_to_num())


def sinks_are_those_of_the_definition(dtype: torch.dtype, device: str = "cpu") -> None:
    """That hardly count, and that take nearly all; by one program and by several."""
    sizes = Sizes(num_kv_heads=2, group=3, head_dim=40, dtype=dtype, device=device)
    sinks = torch.tensor([-30.0, 0.0, 1.5, 4.0, 0.5, 9.0], device=device)
    entries = [Entry(num_queries=3, length=90), Entry(num_queries=9, length=61)]
    for splitting, window in ((TOGETHER, 25), (APART, None)):
        world = World(sizes, entries)
        step = TritonBackend(device=world.device, splitting=splitting).prepare(
            world.layout, world.cache
        )
        attended = step.attend(1, *world.rows(), scaling=0.3, sliding_window=window, sinks=sinks)
        expected = world.exact(sliding_window=window, sinks=sinks)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(attended.double(), expected, rtol=tolerance, atol=tolerance)


def wide_heads_are_those_of_the_definition(dtype: torch.dtype, device: str = "cpu") -> None:
    """Of more dimensions than other tiles have registers for; many rows, and few."""
    sizes = Sizes(num_kv_heads=1, group=2, head_dim=272, dtype=dtype, device=device)
    for entries in (
        [Entry(num_queries=21, length=40), Entry(num_queries=1, length=70)],
        [Entry(num_queries=2, length=40)],
    ):
        world = World(sizes, entries)
        # Small: with so many dimensions, scores are large.
        attended = world.attend(APART, scaling=0.05)
        expected = world.exact(scaling=0.05)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(attended.double(), expected, rtol=tolerance, atol=tolerance)


def large_scores_do_not_overflow(dtype: torch.dtype, device: str = "cpu") -> None:
    world = World(Sizes(dtype=dtype, device=device), [Entry(num_queries=4, length=100)])
    for splitting in (TOGETHER, APART):
        attended = world.attend(splitting, scaling=300.0)
        expected = world.exact(scaling=300.0)
        tolerance = 100 * TOLERANCES[dtype] if dtype is torch.float32 else TOLERANCES[dtype]
        torch.testing.assert_close(attended.double(), expected, rtol=tolerance, atol=tolerance)


def bits_do_not_depend_on_the_batch(dtype: torch.dtype, device: str = "cpu") -> None:
    """Alone or among others, by one program or several, in one chunk or token by token."""
    num_kv_heads = interpreted_cases(1, 2)
    sizes = Sizes(num_kv_heads=num_kv_heads, group=6, head_dim=40, dtype=dtype, device=device)
    entries = [
        Entry(num_queries=7, length=75),
        # With it, the step has more tokens than a small one.
        Entry(num_queries=70, length=80),
        Entry(num_queries=0, length=40),
        Entry(num_queries=9, length=9),
        # The most splits, in the last tile, for which programs may be missing.
        Entry(num_queries=1, length=100),
    ]
    for sliding_window, alone_by in ((None, APART), (45, TOGETHER)):

        def attend(splitting: Splitting, window: int | None = sliding_window) -> torch.Tensor:
            world = World(sizes, entries)
            return world.attend(splitting, sliding_window=window, is_strict=True)

        together, apart = attend(TOGETHER), attend(APART)
        assert torch.equal(together, apart)
        # Two or three splits for some programs, one for others.
        for max_programs in interpreted_cases((35,), (15, 35, 55)):
            limit = num_kv_heads * max_programs
            shared = dataclasses.replace(APART, max_programs=limit)
            assert torch.equal(attend(shared), together)
        counts = [entry.num_queries for entry in entries]
        for entry, rows in zip(entries, together.split(counts), strict=True):
            for at in {entry.num_queries // 2, entry.num_queries - 1} & set(range(len(rows))):
                # The same text, with this row the only one that is new.
                position = entry.length - entry.num_queries + at
                alone = row_alone(sizes, entry, position, alone_by, sliding_window)
                assert torch.equal(alone, rows[at]), (entry, at)


def row_alone(
    sizes: Sizes, entry: Entry, position: int, splitting: Splitting, sliding_window: int | None
) -> torch.Tensor:
    """The row at a position of an entry's text, computed in a step of its own."""
    world = World(sizes, [entry], seed=5)
    queries, keys, values = (each[:, : position + 1] for each in world.texts[0])
    world.entries = [Entry(num_queries=1, length=position + 1)]
    world.texts = [(queries, keys, values)]
    blocks = -(-(position + 1) // sizes.block_size)
    world.tables = [world.tables[0][:blocks]]
    # All K/V that precedes.
    past = lay_out(
        [
            ScheduledTokens(
                token_ids=[0] * (position + 1),
                draft_token_ids=[],
                num_computed_tokens=0,
                block_table=world.tables[0],
            )
        ],
        block_size=sizes.block_size,
    )
    world.cache.write(1, keys, values, torch.from_numpy(past.slot_mapping).to(world.device))
    world.layout = world._layout()
    return world.attend(splitting, sliding_window=sliding_window, is_strict=True)[0]


def padding_changes_no_bit(dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows past the last sequence, sequences without queries, entries of tables past their end;
    tables in rows of their own order, between others.
    """
    sizes = Sizes(head_dim=40, dtype=dtype, device=device)
    entries = [Entry(num_queries=1, length=70), Entry(num_queries=5, length=80)]
    # As many tokens as a step of small tiles may have.
    num_padded = SMALL_STEP_TOKENS - sum_of_queries(entries)
    for is_strict in shapes_of_tiles(dtype):
        plain = World(sizes, entries)
        expected = plain.attend(APART, is_strict=is_strict)
        for filling, splitting in itertools.product((torch.nan, torch.inf, 3.0), (TOGETHER, APART)):
            world = World(sizes, entries)
            num_rows = int(world.layout.cu_seqlens_q[-1])
            padded_table = torch.full((7, 20), 1 << 30, dtype=torch.int32, device=device)
            table_rows = [4, 2, 1 << 30, 1 << 30, 1 << 30]
            for row, blocks in zip(table_rows, world.tables, strict=False):
                padded_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            offsets = [*world.layout.cu_seqlens_q.tolist(), num_rows, num_rows, num_rows]
            slots = [*world.layout.slot_mapping.tolist(), *[-1] * num_padded]
            tables = DeviceTables(
                counts=torch.tensor([2, num_rows, 80], dtype=torch.int32, device=device),
                cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device),
                seq_lens=torch.tensor([70, 80, 0, 0, 0], dtype=torch.int32, device=device),
                table_rows=torch.tensor(table_rows, dtype=torch.int32, device=device),
                block_tables=padded_table,
                slot_mapping=torch.tensor(slots, device=device),
                longest_k=300,
            )
            backend = TritonBackend(device=world.device, splitting=splitting, is_strict=is_strict)
            step = backend.prepare_tables(tables, world.cache)
            before = [blocks.clone() for blocks in world.cache.blocks(0)]
            rows = [
                torch.cat((each, each.new_full((len(each), num_padded, 40), filling)), dim=1)
                for each in world.rows()
            ]
            world.cache.begin_step()
            attended = step.attend(1, *rows, scaling=0.3, sliding_window=None)
            assert torch.equal(attended[:num_rows], expected)
            assert world.cache.finite_rows()[:num_rows].all()
            for theirs, ours in zip(plain.cache.blocks(1), world.cache.blocks(1), strict=True):
                assert torch.equal(theirs.nan_to_num(nan=77), ours.nan_to_num(nan=77))
            for earlier, now in zip(before, world.cache.blocks(0), strict=True):
                assert torch.equal(earlier, now)


def _tables_to_fill(world: World) -> DeviceTables:
    """Of a step of 8 tokens of two sequences, whose tables are in rows 2 and 1."""
    tables = device_tables(world.layout, world.device)
    return dataclasses.replace(
        tables,
        table_rows=2 - tables.table_rows,
        # On a CPU it is the layout's own memory.
        slot_mapping=tables.slot_mapping.clone(),
        block_tables=torch.zeros((3, 10), dtype=torch.int32, device=world.device),
        longest_k=160,
    )


def _fill(tables: DeviceTables, world: World) -> None:
    """Overwrites a step's indices with those of a world's step."""
    new = device_tables(world.layout, world.device)
    tables.counts.copy_(new.counts)
    tables.cu_seqlens_q.copy_(new.cu_seqlens_q)
    tables.seq_lens.copy_(new.seq_lens)
    tables.block_tables[tables.table_rows, : new.block_tables.shape[1]] = new.block_tables
    tables.slot_mapping.copy_(new.slot_mapping)


def a_captured_step_is_replayed(dtype: torch.dtype, device: str) -> None:
    """By a CUDA graph: rows, lengths, blocks and slots differ from those of the capture."""
    sizes = Sizes(head_dim=64, dtype=dtype, device=device)
    entries = [Entry(num_queries=4, length=160), Entry(num_queries=4, length=90)]
    others = [Entry(num_queries=6, length=140, seed=1), Entry(num_queries=2, length=35, seed=1)]
    for splitting in (TOGETHER, APART):
        world, other, fresh = (World(sizes, each) for each in (entries, others, others))
        expected = fresh.attend(splitting)
        tables = _tables_to_fill(world)
        rows = [each.clone() for each in world.rows()]
        _fill(tables, world)
        # Two caches of the same size: the capture's, which the replay must find as `other` has it.
        backend = TritonBackend(device=world.device, splitting=splitting)
        step = backend.prepare_tables(tables, world.cache)
        step.attend(1, *rows, scaling=0.3, sliding_window=None)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attended = step.attend(1, *rows, scaling=0.3, sliding_window=None)
        for blocks, past in zip(world.cache.blocks(1), other.cache.blocks(1), strict=True):
            blocks[: len(past)] = past
        _fill(tables, other)
        for row, new in zip(rows, other.rows(), strict=True):
            row.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(attended, expected)


def what_is_written_is_that_of_the_cache(dtype: torch.dtype, device: str = "cpu") -> None:
    """Values that are not finite as zero, their rows reported; any strides."""
    for num_kv_heads, head_dim in ((1, 16), (3, 40), (8, 128)):
        sizes = Sizes(num_kv_heads=num_kv_heads, group=1, head_dim=head_dim, dtype=dtype)
        sizes = dataclasses.replace(sizes, device=device)
        worlds = [World(sizes, [Entry(num_queries=9, length=30)]) for _ in range(2)]
        queries, keys, values = worlds[0].rows()
        keys[0, 2, 5], keys[-1, 4, 0] = torch.nan, torch.inf
        values[-1, 4, -1], values[0, 7, 3] = -torch.inf, torch.nan
        keys = keys.transpose(0, 1).contiguous().transpose(0, 1)  # as a model's projection is
        backends: tuple[AttentionBackend, ...] = (
            TritonBackend(device=worlds[0].device, splitting=APART),
            SdpaBackend(device=worlds[1].device),
        )
        for world, backend in zip(worlds, backends, strict=True):
            world.cache.begin_step()
            step = backend.prepare(world.layout, world.cache)
            step.attend(1, queries, keys, values, scaling=1.0, sliding_window=None)
            assert world.cache.finite_rows().tolist() == [i not in (2, 4, 7) for i in range(9)]
        ours, theirs = (world.cache.blocks(1) for world in worlds)
        for our_blocks, their_blocks in zip(ours, theirs, strict=True):
            assert torch.equal(our_blocks.nan_to_num(nan=77), their_blocks.nan_to_num(nan=77))


def sequences_of_a_models_step_do_not_mix(is_expanded: bool, device: str = "cpu") -> None:
    model = make_small_model("mistral").model.to(device)  # type: ignore[arg-type]
    backend = TritonBackend(device=torch.device(device), splitting=APART)
    paged = PagedModel(model, backend=backend, num_blocks=32)
    tables = [list(range(31, 26, -1)), [3, 7, 1], [12, 0]]
    paged.check_that_sequences_do_not_mix(tables, longest=70, is_expanded=is_expanded)


def more_heads_may_share_kv_than_a_tile_has_rows(device: str = "cpu") -> None:
    """Then a tile has more rows, of one token."""
    world = World(
        Sizes(num_kv_heads=1, group=20, device=device),
        [Entry(num_queries=1, length=40), Entry(num_queries=3, length=70)],
    )
    for splitting in (TOGETHER, APART):
        world.check(world.attend(splitting))


def a_sequence_may_end_where_a_split_does(device: str = "cpu") -> None:
    """So there is no split past the last one, whose results would lie among another row's."""
    for length in (32, 64, 128, 192):
        world = World(Sizes(device=device), [Entry(num_queries=3, length=length)])
        for splitting in (TOGETHER, APART):
            world.check(world.attend(splitting))


def a_step_reads_its_indices_at_every_launch(device: str = "cpu") -> None:
    """As when a CUDA graph is replayed: the same step, its tensors filled anew."""
    for splitting in (TOGETHER, APART):
        sizes = Sizes(device=device)
        world = World(sizes, [Entry(num_queries=4, length=60), Entry(num_queries=4, length=90)])
        other = World(
            sizes,
            [Entry(num_queries=6, length=140, seed=1), Entry(num_queries=2, length=35, seed=1)],
        )
        tables = _tables_to_fill(world)
        for each in (world, other, world):
            _fill(tables, each)
            backend = TritonBackend(device=each.device, splitting=splitting)
            step = backend.prepare_tables(tables, each.cache)
            each.check(step.attend(1, *each.rows(), scaling=0.3, sliding_window=None))


def a_cache_may_have_more_values_than_int32_counts(device: str = "cpu") -> None:
    """Of keys, and of values as many; here they are the same ones. 4 GiB, of which a host's memory
    holds those that are used.
    """
    num_kv_heads, head_dim, block_size = 2, 128, 16
    block_values = block_size * num_kv_heads * head_dim
    generator = torch.Generator().manual_seed(1)
    queries, keys = (
        torch.randn((heads, 20, head_dim), generator=generator).half().to(device)
        for heads in (2 * num_kv_heads, num_kv_heads)
    )
    attended = []
    for num_blocks in (2, 2**31 // block_values + 2):
        cached = torch.empty(
            (num_blocks, block_size, num_kv_heads, head_dim), dtype=torch.float16, device=device
        )
        layout = lay_out(
            [
                ScheduledTokens(
                    token_ids=[0] * 20,
                    draft_token_ids=[],
                    num_computed_tokens=0,
                    block_table=[num_blocks - 1, num_blocks - 2],
                )
            ],
            block_size=block_size,
        )
        tables = device_tables(layout, torch.device(device))
        write(keys, keys, tables.slot_mapping, cached, cached)
        assert torch.equal(cached[-1], keys[:, :16].transpose(0, 1))
        attended.append(
            paged_attention(
                queries,
                cached,
                cached,
                tables,
                tiles=LARGE_TILES,
                scaling=0.1,
                sliding_window=None,
                splitting=TOGETHER,
            )
        )
    assert torch.equal(*attended)
