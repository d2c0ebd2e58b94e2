"""A stand-in for the gateway."""

from collections.abc import AsyncIterator

import pytest

from tests.client.stand_in_gateway import StandInGateway, stand_in_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[StandInGateway]:
    async with stand_in_gateway() as servicer:
        yield servicer
