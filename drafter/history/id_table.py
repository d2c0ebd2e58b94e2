"""The table of known sequences, in order of use, in a form that kernels read and write.

Owns a *slot* per sequence: its id, the address of its text's header, when it was last used, and its
place in the order of last use. Kernels find sequences by the bytes of their ids and update the
order without any Python object. Does not know texts, nor why sequences come and go (`lru.py`).

    buckets   [2^k] int32: slot + 1, or 0; linear probing from the id's hash; removal closes gaps;
              at least half are empty, so that every search ends
    ids       [capacity, MAX_ID_BYTES] uint8, zeros after the id's end
    records   [capacity, 8] int64: hash, id length, address of the header, previous slot, next slot
    last_used_s  [capacity] float64
    ends      int64: least recently used slot, most recently used, first free slot, number of
              sequences, number of slots ever used; -1: none. `NEXT` links free slots
"""

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servicekit.kernels.jit import kernel
from servicekit.kernels.memory import address_of, load_u8, load_unaligned_u64, signed, whole_lines

MAX_ID_BYTES = 64

HASH, ID_LENGTH, HEADER, PREVIOUS, NEXT = range(5)
RECORD_WORDS = 8
OLDEST, NEWEST, _FREE, COUNT, _FRESH = range(5)

_SEED = np.uint64(secrets.randbits(64) | 1)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class SequenceTable(NamedTuple):
    """The arrays, see above; owned by the event loop, through the store."""

    buckets: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint8]
    records: npt.NDArray[np.int64]
    last_used_s: npt.NDArray[np.float64]
    ends: npt.NDArray[np.int64]
    seed: np.uint64


def make_table(capacity: int) -> SequenceTable:
    """Returns an empty table; memory of unused slots is not touched."""
    num_buckets = 1 << (2 * capacity - 1).bit_length()
    return SequenceTable(
        buckets=np.zeros(num_buckets, dtype=np.int32),
        ids=whole_lines(capacity, RECORD_WORDS).view(np.uint8),
        records=whole_lines(capacity, RECORD_WORDS),
        last_used_s=np.zeros(capacity, dtype=np.float64),
        ends=np.array([-1, -1, -1, 0, 0], dtype=np.int64),
        seed=_SEED,
    )


@kernel
def hash_id(address: int, num_bytes: int, seed: np.uint64) -> int:
    """Returns the hash of the id at an address; the seed is odd and secret.

    Each word is multiplied twice: with one multiplication the next word could undo a change of a
    few high bits, whatever the seed is.
    """
    hash_ = seed ^ np.uint64(num_bytes)
    whole = num_bytes & ~7
    for i in range(0, whole, 8):
        hash_ = (hash_ ^ load_unaligned_u64(address + i)) * _MULTIPLIER
        hash_ = (hash_ ^ (hash_ >> np.uint64(29))) * seed
        hash_ ^= hash_ >> np.uint64(32)
    for i in range(whole, num_bytes):
        hash_ = (hash_ ^ np.uint64(load_u8(address + i))) * _MULTIPLIER
        hash_ ^= hash_ >> np.uint64(29)
    return signed(hash_ * _MULTIPLIER)


@kernel
def same_bytes(first: int, second: int, num_bytes: int) -> bool:
    """Whether the bytes at two addresses are equal."""
    whole = num_bytes & ~7
    for i in range(0, whole, 8):
        if load_unaligned_u64(first + i) != load_unaligned_u64(second + i):
            return False
    for i in range(whole, num_bytes):  # noqa: SIM110  # all() of a generator is slower
        if load_u8(first + i) != load_u8(second + i):
            return False
    return True


@kernel
def home_bucket(table: SequenceTable, hash_: int) -> int:
    """Returns the bucket at which the search for an id begins."""
    return (hash_ >> 20) & (len(table.buckets) - 1)


@kernel
def find_slot(table: SequenceTable, hash_: int, address: int, num_bytes: int) -> int:
    """Returns the slot of the sequence with the id at an address; -1: it is unknown."""
    ids = address_of(table.ids)
    bucket = home_bucket(table, hash_)
    while table.buckets[bucket] != 0:
        slot = table.buckets[bucket] - 1
        if (
            table.records[slot, HASH] == hash_
            and table.records[slot, ID_LENGTH] == num_bytes
            and same_bytes(ids + MAX_ID_BYTES * slot, address, num_bytes)
        ):
            return signed(slot)
        bucket = (bucket + 1) & (len(table.buckets) - 1)
    return -1


@kernel
def _unlink(table: SequenceTable, slot: int) -> None:
    previous, following = table.records[slot, PREVIOUS], table.records[slot, NEXT]
    if previous < 0:
        table.ends[OLDEST] = following
    else:
        table.records[previous, NEXT] = following
    if following < 0:
        table.ends[NEWEST] = previous
    else:
        table.records[following, PREVIOUS] = previous


@kernel
def _link_last(table: SequenceTable, slot: int, now_s: float) -> None:
    newest = table.ends[NEWEST]
    table.records[slot, PREVIOUS] = newest
    table.records[slot, NEXT] = -1
    if newest < 0:
        table.ends[OLDEST] = slot
    else:
        table.records[newest, NEXT] = slot
    table.ends[NEWEST] = slot
    table.last_used_s[slot] = now_s


@kernel
def touch(table: SequenceTable, slot: int, now_s: float) -> None:
    """Makes a sequence the most recently used one."""
    if table.ends[NEWEST] == slot:
        table.last_used_s[slot] = now_s
        return
    _unlink(table, slot)
    _link_last(table, slot, now_s)


@kernel
def add(table: SequenceTable, data: npt.NDArray[np.uint8], header: int, now_s: float) -> int:
    """Adds a sequence, which is not there yet, as the most recently used; returns its slot.

    There must be room for it. `data` is its id, [1..MAX_ID_BYTES] uint8.
    """
    slot = table.ends[_FREE]
    if slot >= 0:
        table.ends[_FREE] = table.records[slot, NEXT]
    else:
        slot = table.ends[_FRESH]
        table.ends[_FRESH] = slot + 1
    num_bytes = len(data)
    hash_ = hash_id(address_of(data), num_bytes, table.seed)
    # Not as slices: their check of shapes, and the text of its error, take a second to compile.
    for i in range(MAX_ID_BYTES):
        table.ids[slot, i] = data[i] if i < num_bytes else 0
    table.records[slot, HASH] = hash_
    table.records[slot, ID_LENGTH] = num_bytes
    table.records[slot, HEADER] = header
    bucket = home_bucket(table, hash_)
    while table.buckets[bucket] != 0:
        bucket = (bucket + 1) & (len(table.buckets) - 1)
    table.buckets[bucket] = slot + 1
    _link_last(table, slot, now_s)
    table.ends[COUNT] += 1
    return signed(slot)


@kernel
def remove(table: SequenceTable, slot: int) -> None:
    """Removes a sequence."""
    mask = len(table.buckets) - 1
    hole = home_bucket(table, table.records[slot, HASH])
    while table.buckets[hole] != slot + 1:
        hole = (hole + 1) & mask
    bucket = hole
    while True:
        bucket = (bucket + 1) & mask
        other = table.buckets[bucket] - 1
        if other < 0:
            break
        # It may move to the hole unless its search begins after the hole.
        home = home_bucket(table, table.records[other, HASH])
        if (bucket - home) & mask >= (bucket - hole) & mask:
            table.buckets[hole] = other + 1
            hole = bucket
    table.buckets[hole] = 0
    _unlink(table, slot)
    table.records[slot, HEADER] = 0
    table.records[slot, NEXT] = table.ends[_FREE]
    table.ends[_FREE] = slot
    table.ends[COUNT] -= 1


def slots_by_last_use(table: SequenceTable) -> list[int]:
    """Returns the slots, the least recently used first; for tests."""
    slots = []
    slot = int(table.ends[OLDEST])
    while slot >= 0:
        slots.append(slot)
        slot = int(table.records[slot, NEXT])
    return slots


def slot_of(table: SequenceTable, sequence_id: str) -> int:
    """Returns a sequence's slot; -1: it is unknown. For tests."""
    data = np.frombuffer(sequence_id.encode(), dtype=np.uint8)
    hash_ = hash_id(address_of(data), len(data), table.seed)
    return find_slot(table, hash_, address_of(data), len(data))
