"""The harness around real workers, Tandem in process and transformers; and one that breaks."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.environments import InstallError
from benchmarks.peers.protocol import Options, Request
from benchmarks.peers.worker_process import PeerError, running_worker
from benchmarks.workloads import BUNDLED_MODEL


async def test_it_compares_tandem_and_transformers_and_names_what_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(peer: Peer, *_: object) -> Path:
        if peer.package is not None:
            raise InstallError("no such wheel")
        return Path(sys.executable)

    monkeypatch.setattr(command, "python_of", refuses)
    file = tmp_path / "figures.json"
    argv = ["--quick", "--peers", "tandem", "transformers", "openvino", "--cache", str(tmp_path)]
    await command.main([*argv, "--json", str(file)])
    run = json.loads(file.read_text())
    speeds = {(each["peer"], each["mode"]): each for each in run["speeds"]}
    assert speeds.keys() == {
        ("tandem", "speculation"),
        ("tandem", "plain"),
        ("transformers", "plain"),
        ("transformers", "lookup 10"),
    }
    assert all(each["num_identical"] == 1 for each in speeds.values())
    assert speeds["tandem", "plain"]["over_tandem"] == 1
    assert run["errors"] == {"openvino": "no such wheel"}
    printed = capsys.readouterr().out
    assert "| transformers, lookup 10 | 1 |" in printed
    assert "Not measured: openvino: no such wheel" in printed


WORKER = """
import os
from benchmarks.peers.protocol import serve

def start(options):
    def generate(mode, requests, streams):
        os.write(1, b"a library prints this")
        if mode == "lookup 5":
            raise ValueError("five is too few")
        if mode == "lookup 10":
            os._exit(7)
        return [[*request.prompt, streams] for request in requests]
    return generate

serve(start)
"""


def test_a_worker_that_fails_or_dies_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripted_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = Options(model=BUNDLED_MODEL, converted=tmp_path, dtype="float32", threads=1)
    requests = [Request(prompt=[5], max_new_tokens=2)]
    log = tmp_path / "log"
    with running_worker(Path(sys.executable), "scripted_worker", options, log) as worker:
        assert worker.ask("plain", requests, 3).token_ids == [[5, 3]]
        with pytest.raises(PeerError, match="five is too few"):
            worker.ask("lookup 5", requests, 3)
        with pytest.raises(PeerError, match="status 7"):
            worker.ask("lookup 10", requests, 3)
    assert "a library prints this" in log.read_text()
