"""A step's layout on the device: arrays that stay where they are, and one copy per step.

The arrays are views of one allocation, so a captured graph finds each step's contents at the same
addresses, and one host-to-device copy brings them all. Block tables stay on the device: a sequence
keeps a row of `block_tables`, to which its new blocks are appended. The new blocks travel in the
same copy, and are then scattered to their places.

A step may be padded to more tokens than it has. What the padding holds then:

    token_ids, positions   what an earlier step left there: valid ids and positions, of no meaning
    slot_mapping           -1: padding writes no K/V
    cu_seqlens_q           the number of tokens: entries after the last one have no queries
    seq_lens               0
    table_rows             0: an entry without queries reads no row
    logits_indices         0: a row that exists; its logits are not used

Worked example: 2 sequences with tokens 9 4 5 and 3, padded to 8, after a step of 6 tokens 1 to 6
(2 and 0 were computed before; tables A and B in rows 1 and 0):

    counts         2 4 5
    token_ids      9 4 5 3 5 6 0 0        cu_seqlens_q   0 3 4 4 4 4 4 4 4
    positions      2 3 4 0 4 5 0 0        seq_lens       5 1 0 0 0 0 0 0
    slot_mapping   . . . . -1 -1 -1 -1    table_rows     1 0 0 0 0 0 0 0
    (the first step's sixth token was 6, at position 5: what is left of it is stale)

Knows nothing of the model. On a CPU device, staging is ordinary memory.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from verifier.batch.batch_layout import BatchLayout, IntArray
from verifier.batch.slot_lengths import StateEntries

# Each array begins at a multiple of this many bytes, as vector loads require.
_ALIGNMENT = 256
# The slot of padding: kernels do not store K/V there.
_NO_SLOT = -1
# Room for new blocks beside those that a step's tokens can need: of prefixes from the cache.
_SPARE_UPDATES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The largest step.

    Attributes:
        max_num_tokens: of a step, padding included.
        max_num_tables: distinct block tables of a step; as many stay on the device.
        max_table_blocks: of one block table.
        num_state_slots: of recurrent states; 0: the model has none.
    """

    max_num_tokens: int
    max_num_tables: int
    max_table_blocks: int
    num_state_slots: int = 0


class DeviceArrays(NamedTuple):
    """Views of a step's arrays, all int32 and on the device. N tokens, E entries, R logits rows,
    padding included: padded ones have R = N, and as many entries or, if that is less, as there may
    be tables in a step.
    """

    counts: torch.Tensor  # [3]: entries and tokens that are no padding, the longest entry's tokens
    token_ids: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    uses_long_rope: torch.Tensor  # [N]
    slot_mapping: torch.Tensor  # [N]
    cu_seqlens_q: torch.Tensor  # [E + 1]
    seq_lens: torch.Tensor  # [E]
    table_rows: torch.Tensor  # [E], each entry's row of `block_tables`
    logits_indices: torch.Tensor  # [R]
    # As in `StateEntries`; padded entries are stale.
    state_entries: torch.Tensor  # [E, 4]
    save_offsets: torch.Tensor  # [E + 1]
    saves: torch.Tensor  # [num_state_slots, 2]
    block_tables: torch.Tensor  # [max_num_tables, max_table_blocks]


class DeviceBatch:
    """Owned by the engine thread."""

    def __init__(self, limits: BatchLimits, *, device: torch.device) -> None:
        self.limits = limits
        self._device = device
        self._rows = TableRows(limits.max_num_tables, limits.max_table_blocks)
        self.block_tables = torch.zeros(
            (limits.max_num_tables, limits.max_table_blocks), dtype=torch.int32, device=device
        )
        # A token brings at most one new block to its sequence; a sequence ends in any block.
        self._max_num_updates = limits.max_num_tokens + _SPARE_UPDATES
        sizes = dict.fromkeys(DeviceArrays._fields[:-1], limits.max_num_tokens)
        sizes["cu_seqlens_q"] += 1
        sizes["counts"] = 3
        num_uses = limits.max_num_tokens if limits.num_state_slots else 0
        sizes["state_entries"], sizes["save_offsets"] = 4 * num_uses, num_uses + 1
        # A step writes a slot once at most.
        sizes["saves"] = 2 * limits.num_state_slots
        sizes |= {"update_places": self._max_num_updates, "update_blocks": self._max_num_updates}
        starts, num_bytes = {}, 0
        for name, size in sizes.items():
            starts[name] = num_bytes
            num_bytes += -(-4 * size // _ALIGNMENT) * _ALIGNMENT
        self._staging = torch.zeros(
            num_bytes // 4, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._on_device = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
        spans = {name: slice(starts[name] // 4, starts[name] // 4 + sizes[name]) for name in sizes}
        staged = self._staging.numpy()
        self._staged = {name: staged[span] for name, span in spans.items()}
        self._arrays = {name: self._on_device[span] for name, span in spans.items()}
        # Before the first step, all of it is padding.
        for slots in (self._staged["slot_mapping"], self._arrays["slot_mapping"]):
            slots[:] = _NO_SLOT

    def forget_tables(self) -> None:
        """Ids of tables mean others from now on: each is written anew."""
        self._rows = TableRows(self.limits.max_num_tables, self.limits.max_table_blocks)

    def load(
        self,
        layout: BatchLayout,
        *,
        num_padded_tokens: int | None = None,
        states: StateEntries | None = None,
    ) -> DeviceArrays:
        """Queues the copy of a step's layout to the device.

        Only after the result of the step before is there: its copy reads the staging memory.

        Args:
            num_padded_tokens: to which the step is padded, if it `fits`; None: not at all.
            states: what it does with recurrent states, if the model has some.

        Returns:
            The step's arrays: for one `num_padded_tokens`, always the same.

        Raises:
            ValueError: the step is larger than the limits, or than its padding.
        """
        num_tokens, num_entries, num_rows = layout.num_tokens, len(layout.seq_lens), layout.num_rows
        padded = num_tokens, num_entries, num_rows
        if num_padded_tokens is not None:
            padded = self._padded(num_padded_tokens)
        num_padded, num_padded_entries, num_padded_rows = padded
        if num_padded > self.limits.max_num_tokens or not self.fits(layout, num_padded_tokens):
            raise ValueError(
                f"{num_tokens} tokens, {num_entries} entries and {num_rows} rows, padded to "
                f"{num_padded}, where {self.limits.max_num_tokens} are allowed"
            )
        staged = self._staged
        table_rows, places, blocks = self._rows.assign(layout)
        staged["counts"][:] = num_entries, num_tokens, layout.seq_lens.max()
        staged["token_ids"][:num_tokens] = layout.input_token_ids
        staged["positions"][:num_tokens] = layout.positions
        staged["uses_long_rope"][:num_tokens] = layout.uses_long_rope
        _fill(staged["slot_mapping"], layout.slot_mapping, num_padded, _NO_SLOT)
        _fill(staged["cu_seqlens_q"], layout.cu_seqlens_q, num_padded_entries + 1, num_tokens)
        _fill(staged["seq_lens"], layout.seq_lens, num_padded_entries, 0)
        _fill(staged["table_rows"], table_rows, num_padded_entries, 0)
        _fill(staged["logits_indices"], layout.logits_indices, num_padded_rows, 0)
        if states is not None:
            staged["state_entries"][: 4 * num_entries] = states.entries.ravel()
            staged["save_offsets"][: num_entries + 1] = states.save_offsets
            staged["saves"][: states.saves.size] = states.saves.ravel()
        self._copy(places, blocks)
        return self._views(*padded)

    def fits(self, layout: BatchLayout, num_padded_tokens: int | None) -> bool:
        """Whether a step can be padded so. One with entries for single drafts may have too many."""
        if num_padded_tokens is None:
            return True
        num_tokens, num_entries, num_rows = self._padded(num_padded_tokens)
        return (
            layout.num_tokens <= num_tokens
            and len(layout.seq_lens) <= num_entries
            and layout.num_rows <= num_rows
        )

    def padded_arrays(self, num_padded_tokens: int) -> DeviceArrays:
        """What `load` returns for this padding, whatever is loaded."""
        return self._views(*self._padded(num_padded_tokens))

    def _padded(self, num_tokens: int) -> tuple[int, int, int]:
        """Tokens, entries and logits rows of a padded step. Attention launches programs for each
        entry, so there are no more than a step can need.
        """
        return num_tokens, min(num_tokens, self.limits.max_num_tables), num_tokens

    def _views(self, num_tokens: int, num_entries: int, num_rows: int) -> DeviceArrays:
        arrays = self._arrays
        return DeviceArrays(
            counts=arrays["counts"],
            token_ids=arrays["token_ids"][:num_tokens],
            positions=arrays["positions"][:num_tokens],
            uses_long_rope=arrays["uses_long_rope"][:num_tokens],
            slot_mapping=arrays["slot_mapping"][:num_tokens],
            cu_seqlens_q=arrays["cu_seqlens_q"][: num_entries + 1],
            seq_lens=arrays["seq_lens"][:num_entries],
            table_rows=arrays["table_rows"][:num_entries],
            logits_indices=arrays["logits_indices"][:num_rows],
            state_entries=arrays["state_entries"][: 4 * num_entries].view(-1, 4),
            save_offsets=arrays["save_offsets"][: num_entries + 1],
            saves=arrays["saves"].view(-1, 2),
            block_tables=self.block_tables,
        )

    def _copy(self, places: list[int], blocks: list[int]) -> None:
        """Copies everything; then appends the new blocks to their tables."""
        count = len(places)
        is_staged = count <= self._max_num_updates
        if is_staged:
            self._staged["update_places"][:count] = places
            self._staged["update_blocks"][:count] = blocks
        self._on_device.copy_(self._staging, non_blocking=True)
        if not count:
            return
        if is_staged:
            on_device = (self._arrays["update_places"], self._arrays["update_blocks"])
        else:
            # Long prefixes from the cache: a further copy, which waits.
            update = torch.tensor([places, blocks], dtype=torch.int32).to(self._device)
            on_device = (update[0], update[1])
        self.block_tables.view(-1).index_copy_(0, on_device[0][:count].long(), on_device[1][:count])


@dataclass(slots=True)
class _KnownTable:
    """The first `num_blocks` blocks of a table are in its row."""

    row: int
    num_blocks: int = 0


class TableRows:
    """Which row of the device's block tables holds which table, and how much of it. Pure.

    Where no row is free, the least recently used table loses its own.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._num_rows = num_rows
        self._num_columns = num_columns
        self._free = list(range(num_rows - 1, -1, -1))
        # By table id, the last used at the end.
        self._known: OrderedDict[int, _KnownTable] = OrderedDict()

    def assign(self, layout: BatchLayout) -> tuple[list[int], list[int], list[int]]:
        """Gives each entry's table a row.

        Returns:
            The rows [E]; and what must be written before the tables can be read: places in the
            flattened rows, and blocks.

        Raises:
            ValueError: there are more tables than rows, or a table is longer than a row.
        """
        table_ids = layout.table_ids.tolist()
        if 0 in table_ids:
            # Nothing is known of a table with id 0: it is written anew, and forgotten.
            table_ids = [each or -1 - entry for entry, each in enumerate(table_ids)]
        self._check(set(table_ids), max(map(len, layout.block_tables)))
        known = self._known
        for table_id in table_ids:
            if table_id in known:
                known.move_to_end(table_id)
        rows: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for table_id, table in zip(table_ids, layout.block_tables, strict=True):
            mine = known.get(table_id)
            if mine is None:
                mine = known[table_id] = _KnownTable(self._take_row())
            first, end = mine.num_blocks, len(table)
            assert end >= first, "a table has shrunk"
            if end > first:
                start = mine.row * self._num_columns
                places += range(start + first, start + end)
                blocks += table[first:]
                mine.num_blocks = end
            rows.append(mine.row)
        for table_id in table_ids:
            if table_id < 0:
                self._free.append(known.pop(table_id).row)
        return rows, places, blocks

    def _check(self, table_ids: set[int], longest: int) -> None:
        """Raises ValueError if the tables do not fit; must come before anything changes."""
        if len(table_ids) > self._num_rows:
            raise ValueError(f"{len(table_ids)} block tables, where {self._num_rows} fit")
        if longest > self._num_columns:
            raise ValueError(f"{longest} blocks in a table, where {self._num_columns} fit")

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        # The step's own tables were all moved behind it, and they are not too many.
        return self._known.popitem(last=False)[1].row


def _fill(
    staged: npt.NDArray[np.int32], values: IntArray | list[int], end: int, padding: int
) -> None:
    """Writes the values, and the padding from their end to `end`."""
    count = len(values)
    staged[:count] = values
    staged[count:end] = padding
