"""What lies in a checkpoint folder beside regular files is refused before it is read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.verifier.cpu.running_decoder import MODEL_FOLDER
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.refusals import CheckpointError
from verifier.transformers_model.config import read_checked_config

JSON_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
# Of both decoders.
READERS: list[Callable[[Path], object]] = [describe_decoder, read_checked_config]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model as a folder of links, as volumes of Kubernetes and caches have them."""
    for file in MODEL_FOLDER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.parametrize("read", READERS)
def test_links_to_files_are_read(folder: Path, read: Callable[[Path], object]) -> None:
    read(folder)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", [*JSON_NAMES, "model.safetensors"])
def test_a_pipe_is_refused(folder: Path, name: str, read: Callable[[Path], object]) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError) as refused:
        read(folder)
    assert str(refused.value) == f"{folder / name}: is no regular file"


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", JSON_NAMES)
def test_json_that_is_larger_than_any_is_refused(
    folder: Path, name: str, read: Callable[[Path], object]
) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).touch()
    os.truncate(folder / name, (100 << 20) + 1)
    with pytest.raises(CheckpointError) as refused:
        read(folder)
    assert str(refused.value) == f"{folder / name}: has more than 100 MiB"


@pytest.mark.parametrize("read", READERS)
def test_a_name_that_no_folder_can_have_is_refused(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        read(tmp_path / ("x" * 300))
