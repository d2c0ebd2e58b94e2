"""Drafters, stand-ins for drafters, and links to them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from servicekit.config import ServerOptions
from servicekit.logs import get_logger
from tests.verifier.drafters.recorded_link import RecordedLink
from tests.verifier.drafters.scripted_drafter import PATIENCE_S, ScriptedDrafter
from verifier.drafters import releases
from verifier.drafters.addresses import AdmittedDrafters

StartScripted = Callable[..., Awaitable[ScriptedDrafter]]
StartDrafter = Callable[..., Awaitable[str]]
OpenLink = Callable[..., RecordedLink]


@pytest.fixture
def releases_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases do not wait for a batch that others need."""
    monkeypatch.setattr(releases, "RELEASE_DELAY_S", 0.0)


@pytest.fixture
async def start_scripted() -> AsyncIterator[StartScripted]:
    """Starts stand-ins for drafters; takes `ScriptedDrafter`'s arguments."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*args: Any, listen: str = "127.0.0.1:0") -> ScriptedDrafter:
            scripted = ScriptedDrafter(*args)
            await scripted.start(listen)
            stack.push_async_callback(scripted.stop)
            return scripted

        yield start


@pytest.fixture
async def scripted(start_scripted: StartScripted) -> ScriptedDrafter:
    return await start_scripted()


@pytest.fixture
async def open_link() -> AsyncIterator[OpenLink]:
    """Opens links; at the end closes them, and checks that no task of theirs is left."""
    before = asyncio.all_tasks()
    opened: list[RecordedLink] = []

    def open_to(
        address: str, *, deadline_s: float = 60.0, admitted: AdmittedDrafters | None = None
    ) -> RecordedLink:
        recorded = RecordedLink(address, deadline_s=deadline_s, admitted=admitted)
        recorded.link.start()
        opened.append(recorded)
        return recorded

    yield open_to
    counts = []
    for recorded in opened:
        recorded.link.close()
        counts.append(len(recorded.messages))
    # The scripted server's tasks end with their streams.
    async with asyncio.timeout(PATIENCE_S):
        while any("DrafterLink" in repr(task) for task in asyncio.all_tasks() - before):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    assert [len(recorded.messages) for recorded in opened] == counts, "closed: nothing is reported"


@pytest.fixture
async def start_drafter() -> AsyncIterator[StartDrafter]:
    """Starts real drafters, with options of their servers; returns their addresses."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> str:
            drafter = DrafterServer(
                DrafterConfig(server=ServerOptions(listen="127.0.0.1:0", **options)),
                registry=CollectorRegistry(),
                logger=get_logger("drafter"),
            )
            await drafter.start()
            stack.push_async_callback(drafter.server.stop, 0)
            return drafter.server.address

        yield start
