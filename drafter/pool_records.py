"""What is kept in pools, as records: their bounds, the texts, and what becomes of them.

Who changes them: `pool_store.py`, and what it is made of, `pool_memory.py` and `waiting_texts.py`.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from drafter.pool_arena import MAX_ARENA_BYTES

MIN_POOL_BYTES = 1 << 16
"""A bound under this leaves no room worth having."""
MAX_POOL_BYTES = 1 << 29
"""What one pool's table can address."""
MAX_POOLS_BYTES = MAX_ARENA_BYTES

TEXT_RECORD_BYTES = 384
"""What is held for a kept text beside its tokens and their index."""
POOL_RECORD_BYTES = 2048
"""What is held for a pool beside its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """How much text is kept, and for how long.

    Raises:
        ValueError: bounds that do not fit together, or that pools cannot work with.
    """

    max_pool_bytes: int
    """Of one pool, its index included."""
    max_pools_bytes: int
    """Of all pools together; an eighth of it is for texts that wait to be taken in."""
    pool_ttl_s: float
    """How long a text is kept."""

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


class FeedOutcome(Enum):
    """What became of a text that was to be kept."""

    KEPT = "kept"
    DUPLICATE = "duplicate"
    """One with the same feed id is there."""
    TOO_SHORT = "too_short"
    DROPPED = "dropped"
    """More was fed than could be taken in."""


class TextEviction(Enum):
    """Why a kept text was forgotten."""

    POOL_FULL = "pool_full"
    POOLS_FULL = "pools_full"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptText:
    """A copy of one text; what a snapshot is made of."""

    pool_id: str
    token_ids: npt.NDArray[np.uint32]
    feed_key: bytes
    age_s: float
    ngram_mask: int


class Pool:
    """One pool's record; its tokens and its index are behind `block`, 0: not made yet.

    `texts` are in the order they were fed, and `feed_keys` those of them that have one. Whatever
    changes what a snapshot of it says raises `version`.
    """

    __slots__ = (
        "block", "feed_keys", "ngram_mask", "num_kept", "pool_id", "texts", "version",
    )  # fmt: skip

    def __init__(self, pool_id: str, *, version: int = 0) -> None:
        self.pool_id = pool_id
        self.block = 0
        self.ngram_mask = 0
        self.texts: deque[Text] = deque()
        self.feed_keys: set[bytes] = set()
        self.num_kept = 0
        self.version = version

    def add(self, text: "Text") -> None:
        """Adds the newest text."""
        self.texts.append(text)
        self.version += 1
        if text.feed_key:
            self.feed_keys.add(text.feed_key)

    def remove(self, text: "Text") -> None:
        """Removes a text."""
        self.texts.remove(text)
        self.version += 1
        self.feed_keys.discard(text.feed_key)


class Text:
    """One kept text; `num_tokens` of it are in the pool, `waiting` are still to be appended."""

    __slots__ = (
        "fed_at_s", "feed_key", "num_tokens", "pool", "start", "waiting", "waiting_bytes",
    )  # fmt: skip

    def __init__(
        self, pool: Pool, token_ids: npt.NDArray[np.uint32], feed_key: bytes, fed_at_s: float
    ) -> None:
        self.pool = pool
        self.feed_key = feed_key
        self.fed_at_s = fed_at_s
        self.num_tokens = 0
        self.start = 0
        self.waiting: npt.NDArray[np.uint32] | None = token_ids
        self.waiting_bytes = 0
