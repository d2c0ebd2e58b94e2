"""A step's arrays on the device, against arrays made anew from its layout."""

import random
from collections.abc import Callable

import pytest
import torch

from tests.verifier.scheduling.scheduled_world import BLOCK_SIZE, ScheduledWorld
from tests.volume import examples
from verifier.batch.batch_layout import BatchLayout, ScheduledTokens, lay_out
from verifier.engine.step_batch import StepBatch
from verifier.gpu.device_batch import BatchLimits, DeviceArrays, DeviceBatch
from verifier.scheduling.scheduler import ScheduledSequence

CPU = torch.device("cpu")
MAX_NUM_TABLES = 4


def make_batch(
    *, max_num_tokens: int = 64, max_num_tables: int = MAX_NUM_TABLES, max_table_blocks: int = 12
) -> DeviceBatch:
    limits = BatchLimits(
        max_num_tokens=max_num_tokens,
        max_num_tables=max_num_tables,
        max_table_blocks=max_table_blocks,
    )
    return DeviceBatch(limits, device=CPU)


def check(
    arrays: DeviceArrays,
    layout: BatchLayout,
    num_padded: int | None,
    *,
    max_num_tables: int = MAX_NUM_TABLES,
) -> None:
    """Asserts that the arrays hold the layout, and harmless padding."""
    num_tokens, num_entries = layout.num_tokens, len(layout.seq_lens)
    size = num_tokens if num_padded is None else num_padded
    num_padding = size - num_tokens
    sizes = (size, num_entries, layout.num_rows)
    if num_padded is not None:
        sizes = (size, min(size, max_num_tables), size)
    assert (len(arrays.token_ids), len(arrays.seq_lens), len(arrays.logits_indices)) == sizes
    assert arrays.counts.tolist() == [num_entries, num_tokens, max(layout.seq_lens)]
    assert arrays.token_ids[:num_tokens].tolist() == layout.input_token_ids.tolist()
    assert arrays.positions[:num_tokens].tolist() == layout.positions.tolist()
    assert arrays.slot_mapping.tolist() == [*layout.slot_mapping.tolist(), *[-1] * num_padding]
    starts = layout.cu_seqlens_q.tolist()
    assert arrays.cu_seqlens_q.tolist() == starts + [num_tokens] * (sizes[1] - num_entries)
    lengths = layout.seq_lens.tolist()
    assert arrays.seq_lens.tolist() == lengths + [0] * (sizes[1] - num_entries)
    assert not arrays.table_rows[num_entries:].any()
    rows = layout.logits_indices.tolist()
    assert arrays.logits_indices.tolist() == rows + [0] * (sizes[2] - len(rows))
    assert all(each.dtype == torch.int32 for each in arrays)
    for entry, table in enumerate(layout.block_tables):
        row = arrays.block_tables[arrays.table_rows[entry]]
        assert row[: len(table)].tolist() == list(table), "another block table"


class WatchedWorld(ScheduledWorld):
    """Calls `watch` with each step's sequences before they are computed."""

    def __init__(
        self, watch: Callable[[list[ScheduledSequence]], None], *, num_blocks: int
    ) -> None:
        super().__init__(num_blocks=num_blocks)
        schedule = self.scheduler.schedule

        def watched() -> list[ScheduledSequence]:
            scheduled = schedule()
            if scheduled:
                watch(scheduled)
            return scheduled

        self.scheduler.schedule = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(examples(20)))
def test_any_schedule_finds_its_own_tokens_and_blocks(seed: int) -> None:
    """Sequences come and go, share prefixes, are preempted, and reject drafts."""
    chooser = random.Random(seed)
    max_num_tables = 4 + seed % 3
    batch = make_batch(max_num_tables=max_num_tables)
    counts = {"steps": 0, "drafts": 0}

    def watch(scheduled: list[ScheduledSequence]) -> None:
        layout = lay_out(StepBatch(scheduled).entries, block_size=BLOCK_SIZE)
        num_padded = chooser.choice([None, layout.num_tokens, layout.num_tokens + 3, 64])
        arrays = batch.load(layout, num_padded_tokens=num_padded)
        check(arrays, layout, num_padded, max_num_tables=max_num_tables)
        counts["steps"] += 1
        counts["drafts"] += len(layout.draft_token_ids)

    world = WatchedWorld(watch, num_blocks=12)
    for _ in range(24):
        prompt = [0] * 8 + [chooser.randrange(2) for _ in range(chooser.randrange(1, 10))]
        world.open(prompt, chooser.randrange(1, 20))
        for _ in range(chooser.randrange(6)):
            for sequence in world.open_sequences:
                if chooser.random() < 0.7:
                    world.hint(sequence, chooser.randrange(4), chooser.randrange(3))
            world.step()
    world.run_to_end()
    assert counts["steps"] > 20
    assert counts["drafts"] > 0
    assert world.scheduler.counts.num_preemptions > 0
    assert world.scheduler.counts.num_prefix_cache_hits > 0


def tokens(
    token_ids: list[int], table: list[int], table_id: int, *, num_computed: int = 0
) -> ScheduledTokens:
    return ScheduledTokens(
        token_ids=token_ids,
        draft_token_ids=[],
        num_computed_tokens=num_computed,
        block_table=table,
        table_id=table_id,
    )


def load(batch: DeviceBatch, *scheduled: ScheduledTokens) -> tuple[BatchLayout, DeviceArrays]:
    layout = lay_out(scheduled, block_size=BLOCK_SIZE)
    return layout, batch.load(layout)


def num_copied(batch: DeviceBatch, layout: BatchLayout) -> int:
    """How many blocks a load of the layout would write."""
    return len(batch._rows.assign(layout)[2])


def test_only_new_blocks_are_written() -> None:
    batch = make_batch()
    table = [5, 6]
    layout, _ = load(batch, tokens([1] * 6, table, 1))
    assert num_copied(batch, layout) == 0
    table.append(9)
    layout = lay_out([tokens([1] * 6, table, 1, num_computed=6)], block_size=BLOCK_SIZE)
    check(batch.load(layout), layout, None)
    other = lay_out([tokens([1] * 6, [7, 8], 2)], block_size=BLOCK_SIZE)
    assert num_copied(batch, other) == 2


@pytest.mark.parametrize("num_more", [0, 1, 1900])
def test_more_new_blocks_than_the_staging_memory_holds(num_more: int) -> None:
    batch = make_batch(max_num_tokens=4, max_table_blocks=3000)
    num_blocks = batch._max_num_updates + num_more
    table = list(range(1, num_blocks + 1))
    prefix = tokens([1], table, 1, num_computed=BLOCK_SIZE * num_blocks - 1)
    layout, arrays = load(batch, prefix)
    check(arrays, layout, None)
    assert num_copied(batch, layout) == 0


def test_padding_is_what_an_earlier_step_left_there() -> None:
    batch = make_batch(max_num_tokens=8)
    load(batch, tokens([1, 2, 3, 4, 5, 6], [0, 1], 1))
    layout = lay_out(
        [tokens([9, 4, 5], [2, 3], 2, num_computed=2), tokens([3], [1], 3)], block_size=BLOCK_SIZE
    )
    arrays = batch.load(layout, num_padded_tokens=8)
    check(arrays, layout, 8)
    assert arrays.token_ids.tolist() == [9, 4, 5, 3, 5, 6, 0, 0]
    assert arrays.positions.tolist() == [2, 3, 4, 0, 4, 5, 0, 0]


def test_a_step_beyond_the_limits_is_refused_and_changes_nothing() -> None:
    batch = make_batch(max_num_tokens=8, max_num_tables=2, max_table_blocks=2)
    known, _ = load(batch, tokens([1] * 5, [1, 2], 1))
    three = [tokens([1], [i], i) for i in (2, 3, 4)]
    for scheduled, message in (
        (three, "3 block tables, where 2 fit"),
        ([tokens([1] * 8, [4, 5, 6], 9)], "3 blocks in a table, where 2 fit"),
        ([tokens([1] * 9, [4, 5, 6], 9)], "9 tokens, 1 entries and 1 rows, padded to 9, where 8"),
    ):
        with pytest.raises(ValueError, match=message):
            load(batch, *scheduled)
    with pytest.raises(ValueError, match="padded to 4, where 8"):
        batch.load(known, num_padded_tokens=4)
    assert num_copied(batch, known) == 0
    check(batch.load(known), known, None)
