"""The harness around real workers, Tandem in process and transformers; and one that breaks."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.environments import InstallError
from benchmarks.peers.protocol import Options
from benchmarks.workloads import BUNDLED_MODEL


def options(folder: Path) -> Options:
    return Options(model=BUNDLED_MODEL, converted=folder, dtype="float32", threads=1)


def test_it_compares_tandem_and_transformers_and_names_what_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(peer: Peer, *_: object) -> Path:
        if peer.package is not None:
            raise InstallError("no such wheel")
        return Path(sys.executable)

    monkeypatch.setattr(command, "python_of", refuses)
    file = tmp_path / "figures.json"
    command.main(
        [
            *("--peers", "tandem", "transformers", "openvino", "--streams", "1"),
            *("--prompts", "1", "--rounds", "1", "--lookup", "10", "--max-new", "24"),
            *("--cache", str(tmp_path), "--json", str(file)),
        ]
    )
    (comparison,) = json.loads(file.read_text())["comparisons"]
    variants = {(each["peer"], each["mode"]): each for each in comparison["variants"]}
    assert variants.keys() == {
        ("tandem", "speculation"),
        ("tandem", "plain"),
        ("transformers", "plain"),
        ("transformers", "lookup 10"),
    }
    for variant in variants.values():
        assert variant["error"] is None
        assert variant["num_identical"] == 1
        assert variant["median"] > 0
    assert variants["tandem", "plain"]["ratio_to_tandem"] == 1
    assert comparison["errors"] == {"openvino": "no such wheel"}
    for start in comparison["starts"].values():
        assert start["first_token_s"] > 0
        assert start["memory"]["peak_rss_bytes"] >= start["memory"]["pss_bytes"] > 1 << 20
    printed = capsys.readouterr().out
    assert "| transformers, lookup 10 |" in printed
    assert "- openvino: no such wheel" in printed


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the repository's own, from which workers of a test are imported."""
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    import benchmarks.peers.workers

    (path,) = benchmarks.peers.workers.__path__
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "sitecustomize.py").write_text(
        "import benchmarks.peers.workers as workers\n"
        f"workers.__path__ = [{path!r}, {str(folder)!r}]\n"
    )
    return folder


STAND_IN = """
import os
from benchmarks.peers.protocol import serve

def start(options):
    def generate(mode, requests, streams):
        print("a library prints this")
        if mode == "lookup 5":
            raise ValueError("five is too few")
        if mode == "lookup 10":
            os._exit(7)
        return [[*request.prompt, streams] for request in requests]
    return generate

serve(start)
"""
