"""The harness around real workers, Tandem in process and transformers; and one that breaks."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.peers import __main__ as command
from benchmarks.peers.catalogue import Package, Peer
from benchmarks.peers.checkpoint import to_bfloat16, to_float32
from benchmarks.peers.comparison import Comparison, Variant, compare
from benchmarks.peers.environments import InstallError, python_of
from benchmarks.peers.protocol import Options, Request, converted_folder
from benchmarks.peers.report import table
from benchmarks.peers.worker_process import PeerError, running_worker
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
REQUESTS = [Request(prompt=[5], max_new_tokens=2), Request(prompt=[6], max_new_tokens=2)]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of a worker that answers the prompt, fails in one mode and dies in another."""
    (tmp_path / "scripted_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "scripted_worker"


def compared(worker: str, folder: Path, lookups: list[int]) -> Comparison:
    peer = Peer(name="scripted", worker=worker, max_lookup=20)
    return compare(
        [(peer, Path(sys.executable))],
        REQUESTS,
        [[5, 1], [6, 2]],
        options=options(folder),
        streams=[1],
        lookups=lookups,
        rounds=2,
        logs=folder,
        say=lambda _: None,
    )


def test_it_counts_answers_that_are_the_references(worker: str, tmp_path: Path) -> None:
    (variant,) = compared(worker, tmp_path, []).variants
    assert variant.num_identical == 1
    assert len(variant.tokens_per_s) == 2


def test_a_variant_that_fails_is_named_and_the_others_are_measured(
    worker: str, tmp_path: Path
) -> None:
    comparison = compared(worker, tmp_path, [5])
    errors = {variant.mode: variant.error for variant in comparison.variants}
    assert errors == {"plain": None, "lookup 5": "ValueError: five is too few"}
    assert "- scripted, lookup 5, 1: ValueError: five is too few" in table(comparison, 2)


def test_a_worker_that_dies_is_an_error_with_its_status(worker: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_worker(Path(sys.executable), worker, options(tmp_path), log) as process:
        assert process.ask("plain", REQUESTS, 3).token_ids == [[5, 3], [6, 3]]
        with pytest.raises(PeerError, match="status 7"):
            process.ask("lookup 10", REQUESTS, 3)
    assert "a library prints this" in log.read_text()


def test_memory_is_that_of_all_processes_below(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys\n"
        "child = 'import sys; b = bytes([1]) * (100 << 20); print(flush=True); sys.stdin.read()'\n"
        "with subprocess.Popen([sys.executable, '-c', child], stdout=-1) as process:\n"
        "    process.stdout.readline()\n"
        '    print(\'{"answers": [], "duration_s": 1}\', flush=True)\n'
        "    sys.stdin.readlines()\n"
    )
    python = Path(sys.executable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with running_worker(python, "parent", options(tmp_path), tmp_path / "log") as process:
            process.ask("plain", [], 1)
            memory = process.memory()
    assert 100 << 20 < memory.pss_bytes <= memory.peak_rss_bytes < 200 << 20


def test_an_environment_that_cannot_be_made_is_named_and_made_anew(tmp_path: Path) -> None:
    package = Package(version="1", requirements=["./no-such-folder"])
    peer = Peer(name="absent", worker="absent", package=package)
    said: list[str] = []
    # What is left of an environment that was not completed.
    left = tmp_path / "absent-1" / "left"
    left.parent.mkdir()
    left.touch()
    with pytest.raises(InstallError, match="no-such-folder"):
        python_of(peer, tmp_path, said.append)
    assert not left.exists()
    assert len(said) == 1


def test_ratios_compare_plain_with_plain_and_drafts_with_speculation() -> None:
    def variant(peer: str, mode: str, *speeds: float) -> Variant:
        return Variant(peer=peer, mode=mode, streams=1, tokens_per_s=[*speeds])

    comparison = Comparison(
        dtype="float32",
        threads=1,
        variants=[
            variant("tandem", "plain", 10, 20, 10),
            variant("tandem", "speculation", 100, 100, 200),
            variant("openvino", "plain", 20, 30, 20),
            variant("openvino", "lookup 5", 200, 300, 100),
        ],
    )
    ratios = [comparison.ratio_to_tandem(each) for each in comparison.variants]
    assert ratios == [1, 1, 2, 2]


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    rounded = values.bfloat16()
    bits = to_bfloat16(values.numpy())
    np.testing.assert_array_equal(bits, rounded.view(torch.uint16).numpy())
    np.testing.assert_array_equal(to_float32(bits), rounded.float().numpy())


def test_models_do_not_share_what_is_converted_of_them(tmp_path: Path) -> None:
    models = [tmp_path / top / "org" / "model" for top in ("a", "b")]
    for model in models:
        model.mkdir(parents=True)
        (model / "config.json").touch()
        os.utime(model / "config.json", (1, 1))
    first, second = (converted_folder(tmp_path, model, "float32") for model in models)
    assert first != second
    assert converted_folder(tmp_path, tmp_path / "a/org/../org/model", "float32") == first
    os.utime(models[0] / "config.json", (2, 2))
    assert converted_folder(tmp_path, models[0], "float32") != first
