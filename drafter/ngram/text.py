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

from drafter.kernels.memory import address_of
from drafter.ngram import table as ngram_table
from drafter.ngram.params import Algorithm, NgramParams, Overlap, Tie
from drafter.ngram.table import (
    CHUNK_SLOTS,
    MAX_LOAD_PERCENT,
    MAX_TEXT_TOKENS,
    MIN_SLOTS,
    TABLES,
)

TOKEN_BYTES = 4
MIN_CAPACITY_TOKENS = 256

HASH_BASE = np.uint64(secrets.randbits(64) | 1)
"""Of every hash of n-grams and sequence ids in this process; secret, so that who does not know it
cannot choose a text of which half is in one chunk. Texts of long n-grams can be made that collide
whatever it is: those cost a bounded time, see `ngram_index.py`."""

OBJECT_BYTES = 1700
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
        "_words",
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
        self._set_header(np.zeros(_header_words(num_tables, 1), dtype=np.int64))
        words = self._words
        words[ngram_table.MIN_NGRAM] = params.min_ngram
        words[ngram_table.MAX_NGRAM] = params.max_ngram
        words[ngram_table.DISJOINT] = params.overlap is Overlap.DISJOINT
        words[ngram_table.TIE] = _TIES[params.tie]
        words[ngram_table.TOKENS_PER_MATCH] = params.tokens_per_match
        words[ngram_table.CHAINED] = params.chained
        words[ngram_table.INDEXED] = is_indexed
        self.allocated_bytes = (
            OBJECT_BYTES + self._header.nbytes + sum(chunks[0].nbytes for chunks in self._chunks)
        )

    @property
    def length(self) -> int:
        """How many tokens of the buffer are known; kernels append too."""
        return self._words[ngram_table.LENGTH]

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The known tokens, [length] uint32; a view."""
        return self.buffer[: self.length]

    @property
    def is_indexed(self) -> bool:
        """Whether there is an index; else the text is scanned. A kernel may end the index."""
        return self._words[ngram_table.INDEXED] != 0

    @property
    def num_unindexed(self) -> int:
        """How many of the last tokens the index does not know; none, if there is no index."""
        if not self.is_indexed:
            return 0
        return self.length - self._words[ngram_table.INDEXED_LENGTH]

    def bytes_after(self, num_new_tokens: int) -> int:
        """What `allocated_bytes` will be after this many more tokens, before the index grows."""
        known = self.length
        capacity = _capacity_for(known + num_new_tokens, len(self.buffer), self.max_tokens)
        num_bytes = self.allocated_bytes + (capacity - len(self.buffer)) * TOKEN_BYTES
        if known == 0:
            first_slots = _first_slots(num_new_tokens, len(self._chunks))
            num_bytes += sum(first_slots) * _slot_bytes(self.params)
            num_bytes -= sum(chunks[0].nbytes for chunks in self._chunks)
        return num_bytes

    def append(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Appends tokens, [n] uint32, in O(n) amortised; the index catches up in the kernel."""
        known = self.length
        length = known + len(token_ids)
        assert length <= self.max_tokens, "the store refuses what is too long"
        if known == 0:
            self._size_tables(length)
        if length > len(self.buffer):
            grown = np.empty(
                _capacity_for(length, len(self.buffer), self.max_tokens), dtype=np.uint32
            )
            grown[:known] = self.buffer[:known]
            self.allocated_bytes += grown.nbytes - self.buffer.nbytes
            self.buffer = grown
            self._words[ngram_table.TOKENS] = address_of(grown)
            self._words[ngram_table.CAPACITY] = len(grown)
        self.buffer[known:length] = token_ids
        self._words[ngram_table.LENGTH] = length

    def table_growth_bytes(self, index: int) -> int:
        """What `allocated_bytes` will rise by when this table grows."""
        chunks = self._chunks[index]
        slots = self._slots_after_growth(index)
        new_bytes = slots * _slot_bytes(self.params)
        if len(chunks) == 1 and new_bytes > chunks[0].nbytes:
            return new_bytes - chunks[0].nbytes
        if len(chunks) < self._directory_capacity:
            return new_bytes
        return new_bytes + self._directory_capacity * len(self._chunks) * 8

    def grow_table(self, index: int) -> None:
        """Makes room for more n-grams; moves `CHUNK_SLOTS` of them at most."""
        chunks = self._chunks[index]
        added = _new_slots(self._slots_after_growth(index), self.params)
        self.allocated_bytes += added.nbytes
        if len(chunks) == 1 and added.nbytes > chunks[0].nbytes:
            old = chunks[0]
            chunks[0] = added
            self.allocated_bytes -= old.nbytes
            self._write_chunk(index, 0)
        else:
            old = chunks[len(chunks) - (1 << (len(chunks).bit_length() - 1))]
            chunks.append(added)
            if len(chunks) > self._directory_capacity:
                self.allocated_bytes += self._directory_capacity * len(self._chunks) * 8
                self._double_directories()
            self._write_chunk(index, len(chunks) - 1)
        old_slots = old.nbytes // _slot_bytes(self.params)
        ngram_table.move_entries(self.address, index, HASH_BASE, address_of(old), old_slots)

    def num_entries(self, n: int) -> int:
        """How many n-grams of a size are in the index; for tests."""
        return self._words[_word(n - self.params.min_ngram, ngram_table.ENTRIES)]

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.length <= len(self.buffer) <= max(self.max_tokens, 0)
        assert self._words[ngram_table.CAPACITY] == len(self.buffer)
        slots_bytes = sum(chunk.nbytes for chunks in self._chunks for chunk in chunks)
        arrays_bytes = self._header.nbytes + self.buffer.nbytes + slots_bytes
        assert self.allocated_bytes == OBJECT_BYTES + arrays_bytes
        if not self.is_indexed:
            return
        words = _slot_bytes(self.params) // 4
        for index, chunks in enumerate(self._chunks):
            entries = sum(int(np.count_nonzero(chunk[::words])) for chunk in chunks)
            assert entries == self._words[_word(index, ngram_table.ENTRIES)]

    def _size_tables(self, num_tokens: int) -> None:
        """Makes the tables, which are empty, as large as so many tokens will probably need."""
        for index, slots in enumerate(_first_slots(num_tokens, len(self._chunks))):
            if slots > MIN_SLOTS:
                chunk = _new_slots(slots, self.params)
                self.allocated_bytes += chunk.nbytes - self._chunks[index][0].nbytes
                self._chunks[index][0] = chunk
                self._write_chunk(index, 0)

    def _slots_after_growth(self, index: int) -> int:
        slots = self._chunks[index][0].nbytes // _slot_bytes(self.params)
        if slots == CHUNK_SLOTS:
            return CHUNK_SLOTS
        # A long text that has just arrived is not followed doubling by doubling: where a table has
        # filled up, the text goes on to repeat itself as a rule.
        entries = self._words[_word(index, ngram_table.ENTRIES)]
        expected = entries + self.num_unindexed // 2
        slots *= 2
        while slots < CHUNK_SLOTS and expected * 100 > slots * MAX_LOAD_PERCENT:
            slots *= 2
        return min(slots, CHUNK_SLOTS)

    def _double_directories(self) -> None:
        self._directory_capacity *= 2
        num_tables = len(self._chunks)
        header = np.zeros(_header_words(num_tables, self._directory_capacity), dtype=np.int64)
        fixed = TABLES + ngram_table.TABLE_WORDS * num_tables
        header[:fixed] = self._header[:fixed]
        self._set_header(header)

    def _set_header(self, header: npt.NDArray[np.int64]) -> None:
        """Takes a header whose directories are still to be written."""
        self._header = header
        # Reads and writes single words faster than the array does.
        self._words = header.data
        self.address = address_of(header)
        for index, chunks in enumerate(self._chunks):
            start = self._directory_start(index)
            self._words[_word(index, ngram_table.DIRECTORY)] = self.address + 8 * start
            for i in range(len(chunks)):
                self._write_chunk(index, i)

    def _write_chunk(self, index: int, i: int) -> None:
        """Puts down where a chunk is, which is the table's last."""
        chunk = self._chunks[index][i]
        self._words[self._directory_start(index) + i] = address_of(chunk)
        slots = chunk.nbytes // _slot_bytes(self.params)
        self._words[_word(index, ngram_table.SHAPE)] = ngram_table.shape_of(i + 1, slots)

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


def _first_slots(num_tokens: int, num_tables: int) -> list[int]:
    """Returns how many slots the tables of a text get that begins with so many tokens.

    Every n-gram of the smallest size is entered, of the larger ones those that repeat: some.
    """
    needed = num_tokens * 100 // MAX_LOAD_PERCENT
    slots = [1 << needed.bit_length()] + [1 << (needed // 4).bit_length()] * (num_tables - 1)
    return [min(max(count, MIN_SLOTS), CHUNK_SLOTS) for count in slots[:num_tables]]


def _slot_bytes(params: NgramParams) -> int:
    return 8 if params.tie is Tie.LONGEST else 4


def _new_slots(num_slots: int, params: NgramParams) -> npt.NDArray[np.uint32]:
    return np.zeros(num_slots * _slot_bytes(params) // 4, dtype=np.uint32)


def _header_words(num_tables: int, directory_capacity: int) -> int:
    return TABLES + (ngram_table.TABLE_WORDS + directory_capacity) * num_tables


def _word(index: int, field: int) -> int:
    return TABLES + ngram_table.TABLE_WORDS * index + field
