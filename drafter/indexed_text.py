"""One text and its index: an append-only buffer of tokens, and a table over it per n-gram size.

Owns the arrays whose addresses the kernels are given, their growth, and what they occupy. Does not
know whose text it is, nor which n-grams are entered (`ngram_index.py`). How the tables are laid out
is written in `ngram_table.py`.
"""

import functools
import math
import secrets

import numpy as np
import numpy.typing as npt

from drafter import ngram_table
from drafter.ngram_params import Algorithm, NgramParams, Overlap, Tie
from drafter.ngram_table import (
    CHUNK_SLOTS,
    MAX_LOAD_PERCENT,
    MAX_TEXT_TOKENS,
    MIN_SLOTS,
    TABLES,
)

TOKEN_BYTES = 4
MIN_CAPACITY_TOKENS = 256

HASH_BASE = np.uint64(secrets.randbits(64) | 1)
"""Of every n-gram's hash in this process; secret, so that nobody can choose texts that collide."""

OBJECT_BYTES = 1200
"""What a text occupies beside its arrays' contents: the objects around them, as measured."""

# From here on a buffer grows by a quarter instead of doubling.
_DOUBLING_TOKENS = 8192

# A buffer that was outgrown leaves a hole in the heap, which tables' chunks shall fill: each takes
# the allocator's 16 bytes more than its slots do, and so must the hole have per chunk. Without them
# a text of 32,000 tokens left an eighth of what it takes unused.
_SPARE_TOKENS = 16 // TOKEN_BYTES

_TIES = {
    Tie.EARLIEST: ngram_table.EARLIEST,
    Tie.LATEST: ngram_table.LATEST,
    Tie.LONGEST: ngram_table.LONGEST,
}


class IndexedText:
    """Tokens that are only ever appended to, and the n-grams among them.

    Owned by the event loop. A kernel that was given `address` reads and writes what is behind it,
    so nothing here may be called while it runs. Invariants: `length <= len(buffer) <= max_tokens`;
    tokens below `length` never change, so a slice of them stays true for ever; the index is that
    of the text's first tokens, see `ngram_index.py`.

    Attributes:
        params: how this text is drafted from.
        buffer: the tokens and the free room after them, [capacity] uint32.
        max_tokens: how many it may have.
        address: of the header that `ngram_table.py` describes; growing a table may change it.
        allocated_bytes: what all of it occupies, free room included.
    """

    __slots__ = (
        "_chunks",
        "_directory_capacity",
        "_header",
        "address",
        "allocated_bytes",
        "buffer",
        "max_tokens",
        "params",
    )

    def __init__(self, *, params: NgramParams, max_tokens: int) -> None:
        self.params = params
        self.buffer: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self.max_tokens = max_tokens
        is_indexed = params.algorithm is Algorithm.INDEX
        num_tables = params.num_sizes if is_indexed else 0
        self._chunks = [[_new_slots(MIN_SLOTS, params)] for _ in range(num_tables)]
        self._directory_capacity = 1
        self._header = np.zeros(_header_words(num_tables, 1), dtype=np.int64)
        self.address = self._header.ctypes.data
        header = self._header
        header[ngram_table.MIN_NGRAM] = params.min_ngram
        header[ngram_table.MAX_NGRAM] = params.max_ngram
        is_disjoint = params.overlap is Overlap.DISJOINT
        header[ngram_table.DISJOINT] = is_disjoint
        header[ngram_table.TIE] = _TIES[params.tie]
        header[ngram_table.TOKENS_PER_MATCH] = params.tokens_per_match
        header[ngram_table.CHAINED] = params.chained
        header[ngram_table.INDEXED] = is_indexed
        self._write_directories()
        self.allocated_bytes = (
            OBJECT_BYTES + header.nbytes + sum(chunks[0].nbytes for chunks in self._chunks)
        )

    @property
    def length(self) -> int:
        """How many tokens of the buffer are known; kernels append too."""
        return int(self._header[ngram_table.LENGTH])

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The known tokens, [length] uint32; a view."""
        return self.buffer[: self.length]

    @property
    def num_unindexed(self) -> int:
        """How many of the last tokens the index does not know."""
        if not self._chunks:
            return 0
        return self.length - int(self._header[ngram_table.INDEXED_LENGTH])

    def bytes_after(self, num_new_tokens: int) -> int:
        """What `allocated_bytes` will be after this many more tokens, before the index grows."""
        capacity = _capacity_for(self.length + num_new_tokens, len(self.buffer), self.max_tokens)
        return self.allocated_bytes + (capacity - len(self.buffer)) * TOKEN_BYTES

    def append(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Appends tokens, [n] uint32, in O(n) amortised; the index catches up in the kernel."""
        known = self.length
        length = known + len(token_ids)
        assert length <= self.max_tokens, "the store refuses what is too long"
        if length > len(self.buffer):
            grown = np.empty(
                _capacity_for(length, len(self.buffer), self.max_tokens), dtype=np.uint32
            )
            grown[:known] = self.buffer[:known]
            self.allocated_bytes += grown.nbytes - self.buffer.nbytes
            self.buffer = grown
            self._header[ngram_table.TOKENS] = grown.ctypes.data
            self._header[ngram_table.CAPACITY] = len(grown)
        self.buffer[known:length] = token_ids
        self._header[ngram_table.LENGTH] = length

    def table_growth_bytes(self, index: int) -> int:
        """What `allocated_bytes` will rise by when this table grows."""
        chunks = self._chunks[index]
        slots = self._slots_after_growth(index)
        new_bytes = slots * _slot_bytes(self.params)
        if len(chunks) == 1 and slots > len(chunks[0]) * 4 // _slot_bytes(self.params):
            return new_bytes - chunks[0].nbytes
        if len(chunks) < self._directory_capacity:
            return new_bytes
        return new_bytes + self._directory_capacity * len(self._chunks) * 8

    def grow_table(self, index: int) -> None:
        """Makes room for more n-grams; moves `CHUNK_SLOTS` of them at most."""
        growth_bytes = self.table_growth_bytes(index)
        chunks = self._chunks[index]
        slots = self._slots_after_growth(index)
        old_slots = len(chunks[0]) * 4 // _slot_bytes(self.params)
        if old_slots < CHUNK_SLOTS:
            old = chunks[0]
            chunks[0] = _new_slots(slots, self.params)
            self._write_chunk(index, 0)
        else:
            old = chunks[len(chunks) - (1 << (len(chunks).bit_length() - 1))]
            chunks.append(_new_slots(slots, self.params))
            if len(chunks) > self._directory_capacity:
                self._double_directories()
            self._write_chunk(index, len(chunks) - 1)
        ngram_table.move_entries(self.address, index, HASH_BASE, old.ctypes.data, old_slots)
        self.allocated_bytes += growth_bytes

    def num_entries(self, n: int) -> int:
        """How many n-grams of a size are in the index; for tests."""
        return int(self._header[_word(n - self.params.min_ngram, ngram_table.ENTRIES)])

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.length <= len(self.buffer) <= max(self.max_tokens, 0)
        assert self._header[ngram_table.CAPACITY] == len(self.buffer)
        slots_bytes = sum(chunk.nbytes for chunks in self._chunks for chunk in chunks)
        arrays_bytes = self._header.nbytes + self.buffer.nbytes + slots_bytes
        assert self.allocated_bytes == OBJECT_BYTES + arrays_bytes
        words = _slot_bytes(self.params) // 4
        for index, chunks in enumerate(self._chunks):
            entries = sum(int(np.count_nonzero(chunk[::words])) for chunk in chunks)
            assert entries == self._header[_word(index, ngram_table.ENTRIES)]

    def _slots_after_growth(self, index: int) -> int:
        slots = len(self._chunks[index][0]) * 4 // _slot_bytes(self.params)
        if slots == CHUNK_SLOTS:
            return CHUNK_SLOTS
        slots *= 2
        # A long text that has just arrived is not followed doubling by doubling: it is expected to
        # go on like the part of it that is indexed, and large n-grams may become more.
        unindexed = self.num_unindexed
        if unindexed > 2 * slots:
            slots *= 2
        indexed = max(1, self.length - unindexed)
        entries = int(self._header[_word(index, ngram_table.ENTRIES)])
        expected = entries * self.length // indexed
        while slots < CHUNK_SLOTS and expected * 100 > slots * MAX_LOAD_PERCENT:
            slots *= 2
        return min(slots, CHUNK_SLOTS)

    def _double_directories(self) -> None:
        self._directory_capacity *= 2
        num_tables = len(self._chunks)
        header = np.zeros(_header_words(num_tables, self._directory_capacity), dtype=np.int64)
        fixed = TABLES + ngram_table.TABLE_WORDS * num_tables
        header[:fixed] = self._header[:fixed]
        self._header = header
        self.address = header.ctypes.data
        self._write_directories()

    def _write_directories(self) -> None:
        for index, chunks in enumerate(self._chunks):
            start = self._directory_start(index)
            self._header[_word(index, ngram_table.DIRECTORY)] = self.address + 8 * start
            for i in range(len(chunks)):
                self._write_chunk(index, i)

    def _write_chunk(self, index: int, i: int) -> None:
        chunks = self._chunks[index]
        self._header[self._directory_start(index) + i] = chunks[i].ctypes.data
        slots = len(chunks[0]) * 4 // _slot_bytes(self.params)
        self._header[_word(index, ngram_table.SHAPE)] = ngram_table.shape_of(len(chunks), slots)

    def _directory_start(self, index: int) -> int:
        return _header_words(len(self._chunks), 0) + self._directory_capacity * index


def most_tokens(params: NgramParams, max_bytes: int) -> int:
    """Returns how many tokens certainly fit into so many bytes, index included; -1: none, not 0."""
    return _most_tokens(params.algorithm, params.num_sizes, params.tie, max_bytes)


@functools.lru_cache(maxsize=1024)
def _most_tokens(algorithm: Algorithm, num_sizes: int, tie: Tie, max_bytes: int) -> int:
    low, high = -1, MAX_TEXT_TOKENS + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _worst_bytes(algorithm, num_sizes, tie, middle) <= max_bytes:
            low = middle
        else:
            high = middle
    return low


def _worst_bytes(algorithm: Algorithm, num_sizes: int, tie: Tie, num_tokens: int) -> int:
    """Returns what a text occupies at most, whatever its tokens are.

    The buffer's free room is left out: the text's own limit cuts that.
    """
    num_bytes = OBJECT_BYTES + TABLES * 8 + num_tokens * TOKEN_BYTES
    if algorithm is Algorithm.KMP:
        return num_bytes
    # A table has at most 2.5 slots per entry, see `room_in`, or per entry that was expected.
    slots_per_entry = 200 / MAX_LOAD_PERCENT
    num_slots = MIN_SLOTS + slots_per_entry * (num_tokens + 2)
    directory = 2 * (1 + num_tokens * slots_per_entry / CHUNK_SLOTS)
    slot_bytes = 8 if tie is Tie.LONGEST else 4
    table_bytes = num_slots * slot_bytes + (ngram_table.TABLE_WORDS + directory) * 8
    return num_bytes + math.ceil(num_sizes * table_bytes)


def _capacity_for(num_tokens: int, capacity: int, max_tokens: int) -> int:
    if num_tokens <= capacity:
        return capacity
    if num_tokens <= _DOUBLING_TOKENS:
        grown = 1 << (num_tokens - 1).bit_length()
    else:
        grown = max(num_tokens, capacity + capacity // 4)
    grown += grown // CHUNK_SLOTS * _SPARE_TOKENS
    return min(max(grown, MIN_CAPACITY_TOKENS), max_tokens)


def _slot_bytes(params: NgramParams) -> int:
    return 8 if params.tie is Tie.LONGEST else 4


def _new_slots(num_slots: int, params: NgramParams) -> npt.NDArray[np.uint32]:
    return np.zeros(num_slots * _slot_bytes(params) // 4, dtype=np.uint32)


def _header_words(num_tables: int, directory_capacity: int) -> int:
    return TABLES + (ngram_table.TABLE_WORDS + directory_capacity) * num_tables


def _word(index: int, field: int) -> int:
    return TABLES + ngram_table.TABLE_WORDS * index + field
