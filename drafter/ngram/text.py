"""One text and its index: an append-only buffer of tokens, and a table per n-gram size.

Owns the arrays whose addresses kernels are given, their growth, and the count of their bytes. Does
not know whose text it is, nor which n-grams are entered (`index.py`). The layout of the tables is
described in `table.py`.
"""

import bisect
import functools
import math
import secrets

import numpy as np
import numpy.typing as npt

from drafter.ngram import table as ngram_table
from drafter.ngram.params import NgramParams, Overlap, Tie
from drafter.ngram.table import (
    CHUNK_SLOTS,
    MAX_LOAD_PERCENT,
    MAX_TEXT_TOKENS,
    MIN_SLOTS,
    SLOT_BYTES,
    TABLES,
)
from servicekit.kernels.memory import address_of

TOKEN_BYTES = 4
MIN_CAPACITY_TOKENS = 256

HASH_BASE = np.uint64(secrets.randbits(64) | 1)
"""Base of all n-gram hashes of this process. It is secret, so that nobody can choose a text whose
n-grams crowd into one chunk. Some texts collide under every base: they cost a bounded time, see
`index.py`."""

OBJECT_BYTES = 1700
"""Memory of a text beside the contents of its arrays, as measured."""

# A larger buffer grows by a quarter instead of doubling.
_DOUBLING_TOKENS = 8192

# An outgrown buffer leaves a hole in the heap for chunks to fill. The allocator adds 16 bytes to
# each chunk, so the hole needs as many per chunk. Without them a text of 32,000 tokens left an
# eighth of its memory unused.
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
    tokens below `length` never change, so a slice of them stays valid; the index covers the first
    tokens of the text (`index.py`).

    Attributes:
        params: the options.
        buffer: the tokens and the free room after them, [capacity] uint32.
        max_tokens: how many it may have.
        address: of the header (`table.py`); changes when a directory grows.
        allocated_bytes: memory of the text, free room included.
    """

    __slots__ = (
        "_chunks", "_directory_capacity", "_header", "_words", "address", "allocated_bytes",
        "buffer", "max_tokens", "params",
    )  # fmt: skip

    def __init__(self, *, params: NgramParams, max_tokens: int) -> None:
        self.params = params
        self.buffer: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self.max_tokens = max_tokens
        num_tables = params.num_tables
        self._chunks = [[_new_slots(MIN_SLOTS)] for _ in range(num_tables)]
        self._directory_capacity = 1
        self._set_header(np.zeros(_header_words(num_tables, 1), dtype=np.int64))
        words = self._words
        words[ngram_table.MIN_NGRAM] = params.min_ngram
        words[ngram_table.MAX_NGRAM] = params.max_ngram
        words[ngram_table.DISJOINT] = params.overlap is Overlap.DISJOINT
        words[ngram_table.TIE] = _TIES[params.tie]
        words[ngram_table.TOKENS_PER_MATCH] = params.tokens_per_match
        words[ngram_table.INDEXED] = num_tables > 0
        self.allocated_bytes = (
            OBJECT_BYTES + self._header.nbytes + sum(chunks[0].nbytes for chunks in self._chunks)
        )

    @property
    def length(self) -> int:
        """How many tokens the text has."""
        return self._words[ngram_table.LENGTH]

    @property
    def token_ids(self) -> npt.NDArray[np.uint32]:
        """The tokens, [length] uint32; a view."""
        return self.buffer[: self.length]

    @property
    def is_indexed(self) -> bool:
        """Whether there is an index, which a kernel may end; else the text is scanned."""
        return self._words[ngram_table.INDEXED] != 0

    @property
    def num_unindexed(self) -> int:
        """How many of the last tokens are not indexed yet; 0 if there is no index."""
        words = self._words
        if not words[ngram_table.INDEXED]:
            return 0
        return words[ngram_table.LENGTH] - words[ngram_table.INDEXED_LENGTH]

    def bytes_after(self, num_new_tokens: int) -> int:
        """Returns `allocated_bytes` after so many more tokens, before they are indexed."""
        known = self.length
        if known > 0 and known + num_new_tokens <= len(self.buffer):
            return self.allocated_bytes
        capacity = _capacity_for(known + num_new_tokens, len(self.buffer), self.max_tokens)
        num_bytes = self.allocated_bytes + (capacity - len(self.buffer)) * TOKEN_BYTES
        if known == 0:
            first_slots = _first_slots(num_new_tokens, len(self._chunks))
            num_bytes += sum(first_slots) * SLOT_BYTES
            num_bytes -= sum(chunks[0].nbytes for chunks in self._chunks)
        return num_bytes

    def append(self, token_ids: npt.NDArray[np.uint32]) -> None:
        """Appends tokens, [n] uint32, in O(n) amortised; a kernel indexes them later."""
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
        """Returns by how much `grow_table` raises `allocated_bytes`."""
        chunks = self._chunks[index]
        new_bytes = self._slots_after_growth(index) * SLOT_BYTES
        if len(chunks) == 1 and new_bytes > chunks[0].nbytes:
            return new_bytes - chunks[0].nbytes
        if len(chunks) < self._directory_capacity:
            return new_bytes
        return new_bytes + self._directory_capacity * len(self._chunks) * 8

    def grow_table(self, index: int) -> None:
        """Makes room for more n-grams; moves at most `CHUNK_SLOTS` of them."""
        chunks = self._chunks[index]
        added = _new_slots(self._slots_after_growth(index))
        if len(chunks) == 1 and len(added) > len(chunks[0]):
            old = chunks[0]
            self._replace_chunk(index, added)
        else:
            self.allocated_bytes += added.nbytes
            old = chunks[len(chunks) - (1 << (len(chunks).bit_length() - 1))]
            chunks.append(added)
            if len(chunks) > self._directory_capacity:
                self.allocated_bytes += self._directory_capacity * len(self._chunks) * 8
                self._double_directories()
            self._write_chunk(index, len(chunks) - 1)
        ngram_table.move_entries(self.address, index, HASH_BASE, address_of(old), len(old))

    def check_integrity(self) -> None:
        """Asserts the invariants; for tests."""
        assert self.length <= len(self.buffer) <= max(self.max_tokens, 0)
        assert self._words[ngram_table.CAPACITY] == len(self.buffer)
        slots_bytes = sum(chunk.nbytes for chunks in self._chunks for chunk in chunks)
        arrays_bytes = self._header.nbytes + self.buffer.nbytes + slots_bytes
        assert self.allocated_bytes == OBJECT_BYTES + arrays_bytes
        if not self.is_indexed:
            return
        for index, chunks in enumerate(self._chunks):
            assert all(len(chunk) <= CHUNK_SLOTS for chunk in chunks)
            entries = sum(int(np.count_nonzero(chunk)) for chunk in chunks)
            assert entries == self._words[_word(index, ngram_table.ENTRIES)]

    def _size_tables(self, num_tokens: int) -> None:
        """Gives the tables, which are empty, the size that so many tokens will probably need."""
        for index, slots in enumerate(_first_slots(num_tokens, len(self._chunks))):
            if slots > MIN_SLOTS:
                self._replace_chunk(index, _new_slots(slots))

    def _replace_chunk(self, index: int, chunk: npt.NDArray[np.int64]) -> None:
        """Replaces the only chunk of a table."""
        self.allocated_bytes += chunk.nbytes - self._chunks[index][0].nbytes
        self._chunks[index][0] = chunk
        self._write_chunk(index, 0)

    def _slots_after_growth(self, index: int) -> int:
        slots = len(self._chunks[index][0])
        if slots == CHUNK_SLOTS:
            return CHUNK_SLOTS
        # A long text that has just arrived would double a table again and again: where one has
        # filled up, the rest of the text usually repeats itself as well.
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
        """Replaces the header; the directories of the new one are not written yet."""
        self._header = header
        # Reads and writes single words faster than the array.
        self._words = header.data
        self.address = address_of(header)
        for index, chunks in enumerate(self._chunks):
            start = self._directory_start(index)
            self._words[_word(index, ngram_table.DIRECTORY)] = self.address + 8 * start
            for i in range(len(chunks)):
                self._write_chunk(index, i)

    def _write_chunk(self, index: int, i: int) -> None:
        """Writes the address of a chunk, which is the table's last, and the table's shape."""
        chunk = self._chunks[index][i]
        self._words[self._directory_start(index) + i] = address_of(chunk)
        self._words[_word(index, ngram_table.SHAPE)] = ngram_table.shape_of(i + 1, len(chunk))

    def _directory_start(self, index: int) -> int:
        return _header_words(len(self._chunks), 0) + self._directory_capacity * index


def tokens_that_fit(params: NgramParams, max_bytes: int) -> int:
    """Returns how many tokens certainly fit, index included; -1: not even an empty text does."""
    return _tokens_that_fit(params.num_tables, max_bytes)


@functools.lru_cache(maxsize=1024)
def _tokens_that_fit(num_tables: int, max_bytes: int) -> int:
    def max_bytes_of(num_tokens: int) -> int:
        """The buffer's free room is left out: `max_tokens` bounds it."""
        # A table has at most 2.5 slots per entry (see `room_in`), or per entry that was expected.
        slots_per_entry = 200 / MAX_LOAD_PERCENT
        num_slots = MIN_SLOTS + slots_per_entry * (num_tokens + 2)
        directory = 2 * (1 + num_tokens * slots_per_entry / CHUNK_SLOTS)
        table_bytes = num_slots * SLOT_BYTES + (ngram_table.TABLE_WORDS + directory) * 8
        text_bytes = OBJECT_BYTES + TABLES * 8 + num_tokens * TOKEN_BYTES
        return text_bytes + math.ceil(num_tables * table_bytes)

    return bisect.bisect_right(range(MAX_TEXT_TOKENS + 1), max_bytes, key=max_bytes_of) - 1


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
    """Returns the slots per table of a text that begins with so many tokens.

    All n-grams of the smallest size are entered, but of the larger ones only some.
    """
    needed = num_tokens * 100 // MAX_LOAD_PERCENT
    slots = [1 << needed.bit_length()] + [1 << (needed // 4).bit_length()] * (num_tables - 1)
    return [min(max(count, MIN_SLOTS), CHUNK_SLOTS) for count in slots[:num_tables]]


def _new_slots(num_slots: int) -> npt.NDArray[np.int64]:
    return np.zeros(num_slots, dtype=np.int64)


def _header_words(num_tables: int, directory_capacity: int) -> int:
    return TABLES + (ngram_table.TABLE_WORDS + directory_capacity) * num_tables


def _word(index: int, field: int) -> int:
    return TABLES + ngram_table.TABLE_WORDS * index + field
