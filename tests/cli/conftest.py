"""Stand-ins for the services, where `python -m NAME` finds them, and for a gateway alone."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.client.stand_in_gateway import StandInGateway, stand_in_gateway


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stand-ins and an empty model."""
    for name in ("drafter", "verifier", "gateway"):
        shutil.copy(Path(__file__).with_name("stand_in_service.py"), tmp_path / f"{name}.py")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path


@pytest.fixture
async def gateway() -> AsyncIterator[StandInGateway]:
    async with stand_in_gateway() as servicer:
        yield servicer
