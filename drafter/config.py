"""The drafter's configuration; `servicekit.config` reads the values."""

from pathlib import Path

import pydantic

from drafter.history.store import StoreLimits
from drafter.ngram.text import TOKEN_BYTES
from drafter.pool_index.records import MAX_POOL_BYTES, MAX_POOLS_BYTES, MIN_POOL_BYTES, PoolLimits
from servicekit.config import ServerOptions

SERVICE = "drafter"


class DrafterConfig(pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What `python -m drafter` runs with."""

    # Loopback only: any other address needs TLS or --allow-plaintext, which the operator chooses.
    server: ServerOptions = ServerOptions(listen="127.0.0.1:50051", metrics_listen="127.0.0.1:9101")

    max_sequences: int = pydantic.Field(default=16_384, ge=1, le=1 << 20)
    """Most sequences known at a time; beyond, the least recently used is forgotten."""

    max_sequence_bytes: int = pydantic.Field(default=32 << 20, ge=TOKEN_BYTES)
    """Most bytes held for one sequence, index included; a longer one gets no drafts. A token takes
    86 at most with an index of n-grams of 2 to 5 tokens, 4 without one."""

    max_history_bytes: int = pydantic.Field(default=1 << 30, ge=TOKEN_BYTES)
    """Most bytes held for all sequences; beyond, the least recently used is forgotten."""

    idle_ttl_s: float = pydantic.Field(default=600.0, gt=0, allow_inf_nan=False)
    """How long a sequence is kept that nobody appends to, in seconds."""

    unread_timeout_s: float = pydantic.Field(default=10.0, gt=0, allow_inf_nan=False)
    """How long a stream's client may leave answers unread before it is disconnected, in seconds."""

    max_pool_bytes: int = pydantic.Field(default=64 << 20, ge=MIN_POOL_BYTES, le=MAX_POOL_BYTES)
    """Most bytes held for one shared pool of text, its index included; the oldest text goes."""

    max_pools_bytes: int = pydantic.Field(
        default=256 << 20, ge=2 * MIN_POOL_BYTES, le=MAX_POOLS_BYTES
    )
    """Most bytes held for all shared pools, an eighth of it for text that waits to be indexed."""

    pool_ttl_s: float = pydantic.Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """How long a text is kept in a shared pool, in seconds."""

    snapshot_dir: Path | None = None
    """Folder of this drafter alone that shared pools are written to and restored from; else they
    are lost when it stops."""

    snapshot_interval_s: float = pydantic.Field(default=300.0, gt=0, allow_inf_nan=False)
    """How often shared pools are written to the snapshot folder, beside at the end, in seconds."""

    @pydantic.model_validator(mode="after")
    def _bounds_fit(self) -> "DrafterConfig":
        if self.max_pools_bytes < 2 * self.max_pool_bytes:
            raise ValueError(
                f"--max-pools-bytes {self.max_pools_bytes} is under twice "
                f"--max-pool-bytes {self.max_pool_bytes}"
            )
        if self.max_history_bytes < self.max_sequence_bytes:
            raise ValueError(
                f"--max-history-bytes {self.max_history_bytes} is under "
                f"--max-sequence-bytes {self.max_sequence_bytes}"
            )
        return self

    def store_limits(self) -> StoreLimits:
        return StoreLimits(
            max_sequences=self.max_sequences,
            max_sequence_bytes=self.max_sequence_bytes,
            max_history_bytes=self.max_history_bytes,
            idle_ttl_s=self.idle_ttl_s,
        )

    def pool_limits(self) -> PoolLimits:
        return PoolLimits(
            max_pool_bytes=self.max_pool_bytes,
            max_pools_bytes=self.max_pools_bytes,
            pool_ttl_s=self.pool_ttl_s,
        )
