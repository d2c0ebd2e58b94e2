"""The plan of a fleet: what the docs say of it, and that no part does more in a larger one."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.fleet import Load, plan

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_docs_have_the_table_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet.main([])
    assert capsys.readouterr().out in (DOCS / "operations.md").read_text()


def test_a_cell_does_the_same_in_a_fleet_of_any_size() -> None:
    load = Load()
    for streams in (10_000, 1_000_000):
        each = plan(streams, load)
        assert each.verifiers <= each.cells * load.cell_verifiers
        assert (each.verifiers - each.cells) * load.sequences >= streams
        assert (each.gateways - each.cells) * load.gateway_streams >= streams
        assert 0 < each.drafter_load <= 1
        assert each.cell_sessions <= load.cell_verifiers * 4


def test_a_small_fleet_is_one_cell_with_one_of_each_to_spare() -> None:
    expected = (40, 1, 2, 2, 2, 4, 12.0, 40 / 0.012 / 146e3)
    assert dataclasses.astuple(plan(40, Load())) == pytest.approx(expected)


def test_slow_drafters_are_more() -> None:
    slow = Load(drafter_proposals=10_000)
    assert plan(10_000, slow).drafters > plan(10_000, Load()).drafters
