"""The drafter's configuration; `servicekit.config` reads the values."""

from pathlib import Path
from typing import Annotated

import pydantic

from drafter.history.store import StoreLimits
from drafter.pool_index.records import MAX_POOLS_BYTES, PoolLimits
from servicekit.config import NO_FLAG, ServerOptions

SERVICE = "drafter"


class DrafterConfig(pydantic.BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What `python -m drafter` runs with."""

    # Loopback only: any other address needs TLS or --allow-plaintext, which the operator chooses.
    server: ServerOptions = ServerOptions(listen="127.0.0.1:50051", metrics_listen="127.0.0.1:9101")

    max_sequences: Annotated[int, NO_FLAG] = 16_384
    """Most sequences known at a time; beyond, the least recently used is forgotten."""

    max_sequence_bytes: Annotated[int, NO_FLAG] = 32 << 20
    """Most bytes held for one sequence, index included; a longer one gets no drafts. A token takes
    106 at most with an index of n-grams of 1 to 5 tokens, 4 without one."""

    max_history_bytes: int = 1 << 30
    """Most bytes held for all sequences; beyond, the least recently used is forgotten."""

    idle_ttl_s: Annotated[float, NO_FLAG] = 600.0
    """How long a sequence is kept that nobody appends to, in seconds."""

    unread_timeout_s: Annotated[float, NO_FLAG] = 10.0
    """How long a stream's client may leave answers unread before it is disconnected, in seconds."""

    max_pool_bytes: Annotated[int, NO_FLAG] = 64 << 20
    """Most bytes held for one shared pool of text, its index included; the oldest text goes."""

    max_pools_bytes: int = pydantic.Field(default=256 << 20, le=MAX_POOLS_BYTES)
    """Most bytes held for all shared pools, an eighth of it for text that waits to be indexed."""

    pool_ttl_s: float = pydantic.Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """How long a text is kept in a shared pool, in seconds."""

    snapshot_dir: Path | None = None
    """Folder of this drafter alone that shared pools are written to and restored from; else they
    are lost when it stops."""

    snapshot_interval_s: Annotated[float, NO_FLAG] = 300.0
    """How often shared pools are written to the snapshot folder, and at the end, in seconds."""

    @pydantic.model_validator(mode="after")
    def _bounds_fit(self) -> "DrafterConfig":
        if self.max_pools_bytes < 2 * self.max_pool_bytes:
            raise ValueError(
                f"--max-pools-bytes {self.max_pools_bytes} is under two pools, "
                f"{2 * self.max_pool_bytes}"
            )
        if self.max_history_bytes < self.max_sequence_bytes:
            raise ValueError(
                f"--max-history-bytes {self.max_history_bytes} is under one sequence, "
                f"{self.max_sequence_bytes}"
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
