"""Copies of texts for other drafters: those that do not arrive are counted, and hold up nothing."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog
from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from gateway.errors import UnavailableError
from gateway.peers.pool_copies import MAX_WAITING_TOKENS, PoolCopies
from gateway.peers.pool_feeder import PoolFeeder
from servicekit.config import ChannelOptions, ServerOptions
from tandem.free_ports import free_port
from tests.integration.stack import wait_until


class Copying:
    """Copies that are counted."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.log = structlog.testing.LogCapture()
        logger = structlog.wrap_logger(None, processors=[self.log])
        self.feeder = PoolFeeder(ChannelOptions(), logger=logger)
        self.copies = PoolCopies(self.feeder, logger=logger, on_copy=self._count)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1


@pytest.fixture
async def copying() -> AsyncIterator[Copying]:
    made = Copying()
    yield made
    await made.copies.stop()
    assert not made.copies._lanes


@pytest.fixture
async def drafter() -> AsyncIterator[DrafterServer]:
    server = DrafterServer(
        DrafterConfig(server=ServerOptions(listen="127.0.0.1:0")),
        registry=CollectorRegistry(),
        logger=structlog.get_logger(),
    )
    await server.start()
    yield server
    await server.server.stop(0)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_one_that_does_not_answer_gets_a_bounded_number_and_holds_up_no_other(
    copying: Copying, drafter: DrafterServer, silent: str
) -> None:
    live = drafter.server.address
    text = [7] * (MAX_WAITING_TOKENS // 2)
    for pool in ("p1", "p2", "p3", "p4"):
        copying.copies.add([silent], pool, text)
    assert copying.outcomes == {"dropped": 2}
    copying.copies.add([silent, live], "p", [1, 2, 3])
    await wait_until(lambda: copying.outcomes["sent"] == 1)
    [kept] = drafter.pools.texts_of("p")
    assert kept.token_ids.tolist() == [1, 2, 3]
    assert copying.outcomes == {"dropped": 3, "sent": 1}
    # What waits is given up when the gateway stops.
    settling = asyncio.create_task(copying.copies.settle())
    await asyncio.sleep(0)
    assert not settling.done()
    await copying.copies.stop()
    await settling


async def test_a_text_that_is_larger_than_the_bound_is_sent_alone(
    copying: Copying, drafter: DrafterServer
) -> None:
    copying.copies.add([drafter.server.address], "p", range(MAX_WAITING_TOKENS + 1))
    copying.copies.add([drafter.server.address], "p", [1, 2, 3])
    await copying.copies.settle()
    assert copying.outcomes == {"sent": 1, "dropped": 1}
    copying.copies.add([drafter.server.address], "p", [1, 2, 3])
    await copying.copies.settle()
    assert copying.outcomes == {"sent": 2, "dropped": 1}
    assert drafter.store.num_sequences == 0


async def test_one_that_is_gone_costs_one_line_and_gets_texts_when_it_is_back(
    copying: Copying,
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    for _ in range(3):
        copying.copies.add([listen], "p", [1, 2, 3])
    await copying.copies.settle()
    assert copying.outcomes == {"failed": 3}
    assert [each["event"] for each in copying.log.entries] == ["pool_not_copied"]
    server = DrafterServer(
        DrafterConfig(server=ServerOptions(listen=listen)),
        registry=CollectorRegistry(),
        logger=structlog.get_logger(),
    )
    await server.start()

    async def is_sent() -> bool:
        copying.copies.add([listen], "p", [1, 2, 3])
        await copying.copies.settle()
        return copying.outcomes["sent"] > 0

    try:
        async with asyncio.timeout(30.0):
            # Its port is tried again after a pause.
            while not await is_sent():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert server.pools.num_texts == 1
    finally:
        await server.server.stop(0)


async def test_an_address_that_may_not_be_called_costs_the_texts_alone(copying: Copying) -> None:
    """It is not on this machine, and plaintext is not allowed."""
    copying.copies.add(["10.0.0.1:50051"], "p", [1, 2, 3])
    await copying.copies.settle()
    assert copying.outcomes == {"failed": 1}
    with pytest.raises(UnavailableError):
        await copying.feeder.load(["10.0.0.1:50051"], "p", [1, 2, 3])


async def test_a_text_without_anything_to_draft_is_not_sent(copying: Copying, silent: str) -> None:
    copying.copies.add([silent], "p", [1])
    await copying.copies.settle()
    assert not copying.outcomes


async def test_a_load_that_one_drafter_does_not_take_is_refused(
    copying: Copying, drafter: DrafterServer
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError):
        await copying.feeder.load([drafter.server.address, gone], "p", [1, 2, 3])
    await copying.feeder.load([drafter.server.address], "p", [1, 2, 3])
    assert drafter.pools.num_texts == 1, "the client tries again, and the text is there once"
