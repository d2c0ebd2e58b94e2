"""`tandem pool load` against a stand-in gateway on loopback."""

import asyncio
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.v1 import gateway_pb2
from tests.client.stand_in_gateway import StandInGateway

pytestmark = pytest.mark.stand_in


async def load(gateway: StandInGateway, *files: Path) -> int:
    arguments = ["pool", "load", "docs", *map(str, files), "--target", gateway.address]
    return await asyncio.to_thread(main, arguments)


async def test_files_are_loaded_and_counted(
    gateway: StandInGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"a.py": "one", "empty.py": "", "b.py": "zwölf"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, "utf-8")
    assert await load(gateway, *(tmp_path / name for name in texts)) == 0
    assert capsys.readouterr().out == "2 texts, 8 tokens loaded into the pool docs\n"
    assert gateway.loaded == [
        gateway_pb2.LoadPoolRequest(pool="docs", text=text) for text in ("one", "zwölf")
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"\x89PNG\xff", "'utf-8' codec can't decode byte 0x89"),
        (b"a\x00b", "is no text: it holds a NUL"),
        (b"a" * 4_128_769, "is larger than 4128768 bytes"),
    ],
    ids=["absent", "other encoding", "binary", "too large"],
)
async def test_a_file_that_is_no_text_is_refused_by_name_and_nothing_is_loaded(
    content: bytes | None,
    reason: str,
    gateway: StandInGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a text")
    if content is not None:
        bad.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        await load(gateway, good, bad)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{bad}: {reason}" in line
    assert gateway.loaded == []
