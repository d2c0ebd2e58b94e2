"""The rows with hardly any load on real services, and the report."""

import importlib.util
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.metrics import Snapshot
from benchmarks.paced_verifier import VOCABULARY, PacedModel, text
from benchmarks.peers.environments import InstallError
from benchmarks.ratios import Interval
from benchmarks.serving import __main__ as command
from benchmarks.serving import gateway_cost, host, load, setting, spans, throughput
from benchmarks.serving.hop import batch_bytes, hop_between
from benchmarks.serving.report import table
from benchmarks.serving.turns import Goal, Measure, Variant, by_turns
from tests.volume import cases
from verifier.batch.batch_layout import ScheduledTokens, lay_out


async def run(folder: Path, *rows: str, streams: int = 1) -> list[dict[str, object]]:
    file = folder / "figures.json"
    await command.main(
        [
            *("--quick", "--streams", str(streams), "--rows", *rows),
            *("--cache", str(folder), "--json", str(file)),
        ]
    )
    written = json.loads(file.read_text())
    assert (written["quick"], written["rows"], written["pin"]) == (True, [*rows], False)
    assert "rounds" in written
    measures: list[dict[str, object]] = written["measures"]
    return measures


def test_processor_time_is_finer_than_the_kernels_ticks() -> None:
    before_s, own_before_s = host.cpu_s(os.getpid()), time.process_time()
    while time.process_time() - own_before_s < 0.002:
        pass
    assert 0.002 <= host.cpu_s(os.getpid()) - before_s < 1.0


def reading(hops_s: list[float]) -> Snapshot:
    """What a verifier exports after these hops."""
    last = sorted(hops_s[-256:])
    return Snapshot(
        taken_at_s=0.0,
        samples={
            "tandem_draft_hop_quantile_seconds": [
                ({"quantile": str(q)}, last[int(q * len(last))] if last else 0.0)
                for q in (0.5, 0.99)
            ],
            "tandem_draft_hop_seconds_bucket": [
                ({"le": le}, float(sum(hop_s <= float(le) for hop_s in hops_s)))
                for le in ("0.001", "0.002", "0.004", "+Inf")
            ],
            "tandem_draft_hop_seconds_count": [({}, float(len(hops_s)))],
        },
    )


def test_hops_of_earlier_turns_do_not_count() -> None:
    """The verifier's gauges are of its last 256."""
    early = [0.001] * 1000
    few = hop_between(reading(early), reading(early + [0.003] * 39))
    assert 0.002 < few.p50_s < 0.004
    enough = hop_between(reading(early), reading(early + [0.003] * 256))
    assert enough.p50_s == 0.003


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "1"], "--rounds: at least 2"),
        (["--pin", "--rows", "replicas"], "without replicas"),
    ],
)
def test_what_would_be_measured_wrongly_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command._parse(options)
    assert message in capsys.readouterr().err


async def test_rows_that_share_a_stack_are_measured_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: object) -> Path:
        raise InstallError("pip failed:\nno such wheel")

    monkeypatch.setattr(throughput, "python_of", refuses)
    monkeypatch.setattr(throughput, "DELAYS_MS", (0, 5))
    monkeypatch.setattr(throughput, "REPLICAS_STREAMS", (1,))
    monkeypatch.setattr(load, "STREAMS", 1)
    monkeypatch.setattr(load, "FRACTIONS", (0.75, 1.0))
    for module in (setting, spans):
        monkeypatch.setattr(module, "EXPORT_INTERVAL_S", 0.05)
    numbers = {"hop": 1, "stack": 1, "openvino": 1, "http": 2, "spans": 2, "structured": 2}
    numbers |= {"random": 1, "delay": 3, "load": 12, "simulation": 2}
    # Starts all services once more, for one more verifier.
    numbers |= cases({}, {"replicas": 1})
    measures = await run(tmp_path, *numbers, streams=1)
    assert [measure["row"] for measure in measures] == [
        row for row, number in numbers.items() for _ in range(number)
    ]
    for measure in measures:
        value = measure["value"]
        if measure["row"] == "openvino":
            assert value is None
            assert measure["note"] == "not measured: no such wheel"
        else:
            assert isinstance(value, dict)
            assert value["low"] <= value["median"] <= value["high"]
            assert value["median"] > 0 or {"share", "later"} & set(str(measure["what"]).split())
    printed = capsys.readouterr()
    assert "| hop: awaited hop p50 / echo p50 | 1 | float32 |" in printed.out
    assert "starts the services: verifier behind a proxy" in printed.err
    assert "starts the services: verifier with spans" in printed.err
    tokens, processor_time = (measure for measure in measures if measure["row"] == "spans")
    num_kilobytes = re.search(r"([\d.]+) kB of spans per request", str(tokens["note"]))
    assert num_kilobytes is not None
    assert float(num_kilobytes[1]) > 0
    assert "ms per token" in str(processor_time["note"])
    loads = [str(measure["what"]) for measure in measures if measure["row"] == "load"]
    assert loads[:2] == ["TTFT p50 at 75%, on", "ITL p50 at 75%, on"]
    replicas = [measure["what"] for measure in measures if measure["row"] == "replicas"]
    assert replicas == cases([], ["two verifiers / one, renames"])
    assert printed.err.count("starts the services: verifier\n") == 1


async def test_the_rows_of_a_model_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not of 64 sequences, whose prompts take seconds.
    monkeypatch.setattr(host, "GOALS", {4: 0.5})
    monkeypatch.setattr(host, "SETTLED_TOKENS", 8)
    monkeypatch.setattr(gateway_cost, "STREAMS", 4)
    host_time, gateway = await run(tmp_path, "host", "gateway", streams=4)
    assert host_time["unit"] == "ms"
    assert "less" in str(host_time["note"])
    assert gateway["unit"] == "us"
    value = gateway["value"]
    assert isinstance(value, dict)
    assert 0 < value["median"] < 10_000


async def test_each_second_round_runs_in_the_opposite_order() -> None:
    ran: list[str] = []

    def variant(name: str) -> Variant:
        async def turn() -> float:
            ran.append(name)
            return float(len(ran))

        return Variant(name=name, streams=1, turn=turn)

    variants = [variant("a"), variant("b")]
    await by_turns(variants, 9, lambda _: None, lambda: len(variants[0].figures) == 3)
    assert "".join(ran) == "ab" + "ab" + "ba" + "ab"
    # The warm-up's are not kept.
    assert [each.figures for each in variants] == [[3, 6, 7], [4, 5, 8]]


def measure_of(median: float, goal: Goal | None) -> Measure:
    value = Interval(median=median, low=median - 0.1, high=median + 0.1)
    return Measure(row="hop", what="x", streams=1, dtype="float32", value=value, goal=goal)


def test_the_table_shows_what_misses_its_goal() -> None:
    lines = table(
        [
            measure_of(1.7, Goal(value=1.6, is_most=True)),
            measure_of(1.5, Goal(value=1.6, is_most=True)),
            measure_of(0.9, Goal(value=0.98)),
            measure_of(0.99, Goal(value=0.98)),
            measure_of(0.5, None),
        ]
    ).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[4:7]] for line in lines]
    assert cells == [
        ["**1.7**", "1.6 to 1.8", "≤ 1.6"],
        ["1.5", "1.4 to 1.6", "≤ 1.6"],
        ["**0.9**", "0.8 to 1", "≥ 0.98"],
        ["0.99", "0.89 to 1.09", "≥ 0.98"],
        ["0.5", "0.4 to 0.6", ""],
    ]


def test_the_paced_model_follows_its_text_by_position() -> None:
    # A prompt, and a sequence with two drafts.
    layout = lay_out(
        [
            ScheduledTokens(
                token_ids=[1, 2, 3],
                draft_token_ids=[],
                num_computed_tokens=0,
                block_table=[0],
            ),
            ScheduledTokens(
                token_ids=[4],
                draft_token_ids=[5, 6],
                num_computed_tokens=9,
                block_table=[1],
            ),
        ],
        block_size=16,
    )
    logits = PacedModel().forward(layout)
    assert logits.shape == (4, VOCABULARY)
    followed = text(20)
    np.testing.assert_array_equal(logits.argmax(axis=1), followed[[3, 10, 11, 12]])
    assert logits.sum() == 4


def test_an_echo_moves_as_many_bytes_as_a_batch_and_its_answer() -> None:
    for num_sequences in (1, 64):
        there, back = batch_bytes(num_sequences)
        assert 40 * num_sequences < there < 120 * num_sequences
        assert 90 * num_sequences < back < 200 * num_sequences


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command._parse(["--png", str(tmp_path / "figures.png")])
    assert "needs matplotlib" in capsys.readouterr().err
