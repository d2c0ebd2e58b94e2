"""A real drafter on loopback for tests of its clients."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from servicekit.config import ServerOptions
from servicekit.logs import get_logger


class Clock:
    """Seconds that pass only when the test sets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """A drafter that serves on loopback."""

    drafter: DrafterServer
    clock: Clock

    @property
    def address(self) -> str:
        return self.drafter.server.address

    @property
    def num_sequences(self) -> int:
        return self.drafter.store.num_sequences


@contextlib.asynccontextmanager
async def served_drafter(
    *, listen: str = "127.0.0.1:0", **options: object
) -> AsyncIterator[ServedDrafter]:
    """Starts a drafter with options of `DrafterConfig`; stops it at the end."""
    clock = Clock()
    drafter = DrafterServer(
        DrafterConfig.model_validate({"server": ServerOptions(listen=listen), **options}),
        registry=CollectorRegistry(),
        logger=get_logger("test"),
        clock=clock,
    )
    try:
        await drafter.start()
        yield ServedDrafter(drafter=drafter, clock=clock)
    finally:
        await drafter.server.stop(0)
