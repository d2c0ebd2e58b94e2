"""Repeats drills on one fleet of real processes, and prints what they cost.

    python -m tests.drills [--drills 1 2 3] [--runs 100] [--json FILE]

Drills take turns, so that each meets the machine in the same states. Tokens and offsets are
compared with an undisturbed run. Detection is the time from the disturbance until the gateway moved
a choice (or a client saw its call break off); recovery, until that choice's next token came.

FILE has every figure after each drill; runs that it has already count, so the same command goes on
where it was stopped. A fleet that a drill leaves broken is replaced. Ctrl-C ends the drills and
prints what there is.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.termination import clear_up_on_sigterm
from tests.drills.catalogue import DRILLS, Drill, carry_out
from tests.drills.fleet import Fleet, running_fleet
from tests.drills.requests import Losses
from tests.drills.run import Outcome, Undisturbed
from tests.drills.whole_file import write_whole

_COLUMNS = (
    "drill", "runs", "requests", "tokens lost", "repeated", "changed", "other problems",
    "detection s, p50", "max", "recovery s, p50", "max", "after detection s, max",
)  # fmt: skip


class Record:
    """The outcomes of all runs so far, by the drill's name, and the file that keeps them."""

    def __init__(self, drills: Sequence[Drill], file: Path | None) -> None:
        """Goes on from the file if there is one.

        Raises:
            ValueError: it holds something else.
        """
        self._file = file
        self.outcomes: dict[str, Outcome] = {}
        if file is not None and file.exists():
            for name, figures in json.loads(file.read_text()).items():
                losses = Losses(**figures.pop("losses"))
                self.outcomes[name] = Outcome(losses=losses, **figures)
        for drill in drills:
            self.outcomes.setdefault(drill.name, Outcome())

    def add(self, drill: Drill, outcome: Outcome) -> None:
        """Adds a run, and writes the file; whoever reads it meanwhile gets the old or the new."""
        self.outcomes[drill.name].add(outcome)
        if self._file is None:
            return
        figures = {name: dataclasses.asdict(each) for name, each in self.outcomes.items()}
        write_whole(self._file, json.dumps(figures, indent=2).encode())

    def next_drill(self, drills: Sequence[Drill], num_runs: int) -> Drill | None:
        """The drill with the fewest runs, the first of equals; None if all have enough."""
        drill = min(drills, key=lambda each: self.outcomes[each.name].num_runs)
        return drill if self.outcomes[drill.name].num_runs < num_runs else None


async def repeat(fleet: Fleet, drills: Sequence[Drill], num_runs: int, record: Record) -> int:
    """All drills in turn, until each has `num_runs` runs or one leaves the fleet broken.

    Returns:
        How many runs left the fleet whole.
    """
    undisturbed = Undisturbed()
    num_whole = 0
    while (drill := record.next_drill(drills, num_runs)) is not None:
        try:
            outcome = await carry_out(drill, fleet, undisturbed)
            is_whole = all(member.is_running for member in fleet.members)
        except Exception as error:
            # Of a fleet that may be broken: a run that counts as one with a problem.
            outcome, is_whole = Outcome(num_runs=1, problems=[f"it raised {error!r}"]), False
        record.add(drill, outcome)
        for problem in outcome.problems:
            print(f"{drill.name}: {problem}", file=sys.stderr, flush=True)
        if not is_whole:
            break
        num_whole += 1
    return num_whole


def row(drill: Drill, outcome: Outcome) -> list[str]:
    """The cells of one drill."""
    after = [
        recovery_s - detection_s
        for detection_s, recovery_s in zip(outcome.detections_s, outcome.recoveries_s, strict=True)
    ]
    losses = outcome.losses
    return [
        f"{drill.number} {drill.name}",
        *(str(outcome.num_runs), str(outcome.num_requests)),
        *(str(losses.num_lost), str(losses.num_repeated), str(losses.num_changed)),
        str(len(outcome.problems)),
        *_median_and_max(outcome.detections_s),
        *_median_and_max(outcome.recoveries_s),
        _median_and_max(after)[1],
    ]


def _median_and_max(values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return f"{statistics.median(values):.2f}", f"{max(values):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    numbers = sorted({drill.number for drill in DRILLS})
    parser.add_argument("--drills", type=int, nargs="+", choices=numbers, default=numbers)
    parser.add_argument("--runs", type=int, default=100, help="of each drill")
    parser.add_argument("--json", type=Path, help="keeps every figure; the drills go on from it")
    arguments = parser.parse_args()
    drills = [drill for drill in DRILLS if drill.number in arguments.drills]
    record = Record(drills, arguments.json)
    clear_up_on_sigterm()
    with contextlib.suppress(KeyboardInterrupt):
        while record.next_drill(drills, arguments.runs) is not None:
            with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder)) as fleet:
                if not asyncio.run(repeat(fleet, drills, arguments.runs, record)):
                    print("a new fleet was broken by its first drill", file=sys.stderr)
                    break
    outcomes = record.outcomes
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for drill in drills:
        print(f"| {' | '.join(row(drill, outcomes[drill.name]))} |")
    return 0 if all(outcomes[drill.name].is_good for drill in drills) else 1


if __name__ == "__main__":
    sys.exit(main())
