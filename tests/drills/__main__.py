"""Repeats drills on one fleet of real processes, and prints what they cost.

    python -m tests.drills [--drills 1 2 3] [--runs 100]

Drills take turns, so that each meets the machine in the same states. Tokens and offsets are
compared with an undisturbed run. Detection is the time from the disturbance until the gateway moved
a choice (or a client saw its call break off); recovery, until that choice's next token came.

A drill that leaves the fleet broken is the last one. Ctrl-C ends the drills; the table has what
there is.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.termination import clear_up_on_sigterm
from tests.drills.catalogue import DRILLS, Drill, carry_out
from tests.drills.fleet import Fleet, running_fleet
from tests.drills.run import Outcome, Undisturbed

_COLUMNS = (
    "drill", "runs", "requests", "tokens lost", "repeated", "changed", "other problems",
    "detection s, p50", "max", "recovery s, p50", "max", "after detection s, max",
)  # fmt: skip


async def repeat(
    fleet: Fleet, drills: Sequence[Drill], num_runs: int, outcomes: Mapping[str, Outcome]
) -> None:
    """All drills in turn, so often; ends early where one leaves the fleet broken."""
    undisturbed = Undisturbed()
    for _ in range(num_runs):
        for drill in drills:
            outcome = await carry_out(drill, fleet, undisturbed)
            outcomes[drill.name].add(outcome)
            for problem in outcome.problems:
                print(f"{drill.name}: {problem}", file=sys.stderr, flush=True)
            if not all(member.is_running for member in fleet.members):
                print(f"{drill.name} broke the fleet", file=sys.stderr)
                return


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
    arguments = parser.parse_args()
    drills = [drill for drill in DRILLS if drill.number in arguments.drills]
    outcomes = {drill.name: Outcome() for drill in drills}
    clear_up_on_sigterm()
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory() as folder,
        running_fleet(Path(folder)) as fleet,
    ):
        asyncio.run(repeat(fleet, drills, arguments.runs, outcomes))
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for drill in drills:
        print(f"| {' | '.join(row(drill, outcomes[drill.name]))} |")
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
