"""Reading safetensors: what is sound is read as the library reads it, all else is refused."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

from servicekit.logs import get_logger
from servicekit.progress_log import ProgressLog
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.tensor_files import TensorFiles

F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def write(folder: Path, header: Any, *, data: bytes = bytes(24), length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(head + text + data)


def test_rows_are_those_that_the_library_wrote(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    stored: dict[str, npt.NDArray[Any]] = {
        "a": generator.standard_normal((700, 33)).astype(np.float32),
        "b": generator.standard_normal((5, 7)).astype(np.float16),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with TensorFiles(tmp_path) as files:
        assert files.tensors.keys() == stored.keys()
        a, b = files.tensors["a"], files.tensors["b"]
        assert (files.rows(a, 0, 700) == stored["a"]).all()
        files.forget(a, 0, 700)
        # Forgotten pages are read again.
        assert (files.rows(a, 681, 19) == stored["a"][681:]).all()
        assert (files.rows(b, 2, 3).view(np.float16) == stored["b"][2:]).all()


def test_how_much_was_read_is_shown_in_percent(tmp_path: Path) -> None:
    stored = {"a": np.ones((300, 10), np.float32), "b": np.ones((100, 10), np.float32)}
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    shown: list[int] = []

    class Progress(ProgressLog):
        def show(self, **figures: int) -> None:
            shown.append(figures["percent"])

    with TensorFiles(tmp_path, Progress("weights", get_logger("test"))) as files:
        for name, start, count in (("a", 0, 100), ("a", 100, 200), ("b", 0, 100), ("b", 0, 100)):
            files.forget(files.tensors[name], start, count)
    assert shown == [25, 75, 100, 100]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b""), "empty"),
        (lambda f: (f / "model.safetensors").write_bytes(b"1234567"), "too short"),
        (lambda f: write(f, {"w": F32}, length=1 << 62), "header"),
        (lambda f: write(f, {"w": F32}, length=1000), "header"),
        (lambda f: write(f, b"[1]", data=b""), "JSON"),
        (lambda f: write(f, b"{", data=b""), "JSON"),
        (lambda f: write(f, b"\xff{}", data=b""), "JSON"),
        (lambda f: write(f, b"[" * 200_000, data=b""), "JSON"),
        (lambda f: write(f, b'{"w":1,"w":2}', data=b""), "twice"),
        (lambda f: write(f, {"w": 1}), "w: lacks"),
        (lambda f: write(f, {"w": {**F32, "shape": [-2, -3]}}), "w: shape"),
        (lambda f: write(f, {"w": {**F32, "shape": [True, 6]}}), "w: shape"),
        (lambda f: write(f, {"w": {**F32, "shape": [2, 3.0]}}), "w: shape"),
        (lambda f: write(f, {"w": {**F32, "shape": [2, 4]}}), "w: has 24 bytes"),
        (lambda f: write(f, {"w": {**F32, "shape": [2**40, 2**40]}}), "w: has 24 bytes"),
        (lambda f: write(f, {"w": {**F32, "shape": [2**60] * 300}}), "w: has 300 dimensions"),
        (lambda f: write(f, {"w": {**F32, "shape": [2**60]}}), "numbers too large"),
        (lambda f: write(f, {"w": {**F32, "data_offsets": [0, 2**60]}}), "numbers too large"),
        (lambda f: write(f, {"w": {**F32, "data_offsets": [24, 0]}}), "w: has -24 bytes"),
        (lambda f: write(f, {"w": {**F32, "data_offsets": [8, 32]}}), "w: starts"),
        (lambda f: write(f, {"w": F32, "x": F32}), "starts"),
        (lambda f: write(f, {"w": F32}, data=bytes(23)), "bytes where its header"),
        (lambda f: write(f, {"w": F32}, data=bytes(25)), "bytes where its header"),
        (lambda f: (f / "model.safetensors").write_text(LFS_POINTER), "pointer of Git LFS"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(
    make: Callable[[Path], Any], told: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match=told) as refusal:
        TensorFiles(tmp_path)
    assert "model.safetensors" in str(refusal.value)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ({}, "weight_map"),
        ({"weight_map": {"w": "../model.safetensors"}}, "no file beside"),
        ({"weight_map": {"w": 3}}, "no file beside"),
        (
            {"weight_map": {"w": "absent.safetensors"}},
            "absent.safetensors: is not there, but model.safetensors.index.json names it: fetch",
        ),
        (
            {"weight_map": {"w": "part.safetensors", "v": "part.safetensors"}},
            "v: part.safetensors does not hold it: .* take the entry out",
        ),
    ],
)
def test_an_index_that_leads_astray_is_refused(index: Any, told: str, tmp_path: Path) -> None:
    write(tmp_path, {"w": F32})
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=told):
        TensorFiles(tmp_path)


def shards(folder: Path, *, stale: torch.Tensor) -> Path:
    """A checkpoint of two shards; the second one also holds `w`, which the index has in the first.

    Returns:
        The second one.
    """
    tensors = {"w": torch.arange(24.0).reshape(4, 6), "v": torch.ones(3)}
    save_file({"w": tensors["w"]}, folder / "a.safetensors")
    save_file({"w": stale, "v": tensors["v"]}, folder / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "b.safetensors"


@pytest.mark.parametrize(
    "stale",
    [
        torch.arange(24.0).reshape(4, 6) + torch.eye(4, 6) * 1e-3,
        torch.arange(24.0).reshape(6, 4),
        torch.arange(24.0).reshape(4, 6).to(torch.bfloat16),
    ],
    ids=["values", "shape", "type"],
)
def test_another_version_of_a_tensor_in_another_shard_is_refused_by_name(
    stale: torch.Tensor, tmp_path: Path
) -> None:
    file = shards(tmp_path, stale=stale)
    with pytest.raises(
        CheckpointError, match=r"w: has other values than in a\.safetensors"
    ) as told:
        TensorFiles(tmp_path)
    assert str(told.value).startswith(str(file))
    assert "model.safetensors.index.json" in str(told.value)


def test_types_that_are_not_known_are_left_to_transformers(tmp_path: Path) -> None:
    write(tmp_path, {"w": {**F32, "dtype": "F4"}})
    with pytest.raises(NotServedError, match="w is stored as F4"):
        TensorFiles(tmp_path)
    with pytest.raises(NotServedError, match="neither"):
        TensorFiles(tmp_path / "absent")
