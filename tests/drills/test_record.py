"""Long drills go on where they were stopped."""

from pathlib import Path

from tests.drills.__main__ import Record, row
from tests.drills.catalogue import DRILLS
from tests.drills.requests import Losses
from tests.drills.run import Outcome


def test_runs_that_the_file_has_count_after_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "drills.json"
    first, second, third = drills = DRILLS[:3]
    record = Record(drills, file)
    outcome = Outcome(
        num_runs=1,
        num_requests=8,
        losses=Losses(1, 2, 3),
        detections_s=[1.5],
        recoveries_s=[1.75],
        problems=["a problem"],
    )
    record.add(first, outcome)
    record.add(second, Outcome(num_runs=1))
    # As if it was stopped here.
    resumed = Record(drills, file)
    assert resumed.outcomes == record.outcomes
    assert resumed.outcomes[first.name] == outcome
    for drill in (third, first, second, third):
        assert resumed.next_drill(drills, 2) is drill
        resumed.add(drill, Outcome(num_runs=1))
    assert resumed.next_drill(drills, 2) is None
    assert Record(drills, file).next_drill(drills, 2) is None
    assert Record(drills, file).next_drill(drills, 3) is first
    # Of other drills, what the file has stays.
    assert Record(DRILLS[3:5], file).outcomes[first.name].num_requests == 8


def test_a_rows_recovery_is_compared_with_its_own_detection() -> None:
    outcome = Outcome(num_runs=2, detections_s=[0.1, 1.5], recoveries_s=[0.2, 1.55])
    assert row(DRILLS[0], outcome)[-1] == "0.10"
