"""Records of pools and of the texts in them, their bounds, and what may become of a text.

Changed by `PoolStore`, and by `PoolMemory` where its docstring says so.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafter.pool_index.arena import MAX_ARENA_BYTES

MIN_POOL_BYTES = 1 << 16
"""Least useful bound."""
MAX_POOL_BYTES = 1 << 29
"""What the table of one pool can address."""
MAX_POOLS_BYTES = MAX_ARENA_BYTES

TEXT_RECORD_BYTES = 384
"""Memory of a text beside its tokens and their index."""
POOL_RECORD_BYTES = 2048
"""Memory of a pool beside its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """How much text is stored, and for how long.

    Raises:
        ValueError: bounds do not fit together, or pools cannot work with one.
    """

    max_pool_bytes: int
    """Of one pool, its index included."""
    max_pools_bytes: int
    """Of all pools together; an eighth of it is for texts that wait to be appended."""
    pool_ttl_s: float
    """How long a text is stored."""

    def __post_init__(self) -> None:
        if not MIN_POOL_BYTES <= self.max_pool_bytes <= MAX_POOL_BYTES:
            raise ValueError(
                f"max_pool_bytes: {self.max_pool_bytes} is not in "
                f"[{MIN_POOL_BYTES}, {MAX_POOL_BYTES}]"
            )
        if not 2 * self.max_pool_bytes <= self.max_pools_bytes <= MAX_POOLS_BYTES:
            raise ValueError(
                f"max_pools_bytes: {self.max_pools_bytes} is not in [twice max_pool_bytes "
                f"{self.max_pool_bytes}, {MAX_POOLS_BYTES}]"
            )

    @property
    def max_waiting_bytes(self) -> int:
        return self.max_pools_bytes // 8


def feed_key_of(feed_id: str) -> bytes:
    """What is kept of a feed's id."""
    return hashlib.blake2b(feed_id.encode(), digest_size=16).digest() if feed_id else b""


class FeedOutcome(Enum):
    """What became of a text that was fed."""

    KEPT = "kept"
    DUPLICATE = "duplicate"
    """A text with its feed id is in the pool."""
    TOO_SHORT = "too_short"
    DROPPED = "dropped"
    """Too much text was waiting to be appended."""


class TextEviction(Enum):
    """Why a text was forgotten."""

    POOL_FULL = "pool_full"
    POOLS_FULL = "pools_full"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolText:
    """One text, as it is fed to a pool and as snapshots hold it."""

    pool_id: str
    token_ids: npt.NDArray[np.uint32]
    ngram_mask: int
    age_s: float = 0.0
    feed_key: bytes = b""
    """Of the id that it was fed with; empty: none."""


@dataclass(slots=True, eq=False)
class Pool:
    """The record of one pool; its tokens and its index are in `block`, 0: not allocated yet.

    `texts` are in the order of feeding; the last `num_waiting` of them have tokens that wait to be
    appended, and count `waiting_bytes`. Each change that a snapshot would show raises `version`.
    """

    pool_id: str
    version: int
    block: int = 0
    ngram_mask: int = 0
    num_kept: int = 0
    num_waiting: int = 0
    waiting_bytes: int = 0
    is_unindexed: bool = False
    texts: "deque[Text]" = field(default_factory=deque)
    feed_keys: set[bytes] = field(default_factory=set)

    @property
    def has_work(self) -> bool:
        """Whether it has tokens to append or to index."""
        return self.is_unindexed or self.num_waiting > 0

    def add(self, text: "Text") -> None:
        self.texts.append(text)
        if text.feed_key:
            self.feed_keys.add(text.feed_key)
        self.version += 1

    def remove(self, text: "Text") -> None:
        self.texts.remove(text)
        self.feed_keys.discard(text.feed_key)
        self.version += 1


@dataclass(slots=True, eq=False, kw_only=True)
class Text:
    """One text: `num_tokens` of it are in the pool; `waiting` are still to be appended."""

    pool: Pool
    fed_at_s: float
    waiting: npt.NDArray[np.uint32] | None
    waiting_bytes: int
    feed_key: bytes = b""
    num_tokens: int = 0
    start: int = 0
