"""Stand-ins for the services, where `python -m NAME` finds them."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stand-ins and an empty model."""
    for name in ("drafter", "verifier", "gateway"):
        shutil.copy(Path(__file__).with_name("stand_in_service.py"), tmp_path / f"{name}.py")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path
