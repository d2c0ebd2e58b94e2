"""Fuzzes all three services over real sockets, with a bystander whose tokens must not change.

    python -m tests.fuzz [--inputs 100000] [--seed 1] [--at-once 24] [--first-call N]

Starts a drafter, a verifier with the bundled model and a gateway as processes, lists their methods
by reflection, and sends each method almost valid messages and corrupted bytes, some on streams that
are half-closed or cancelled. It requires: only statuses that a client can act upon, responses that
follow the contract, an end of every call, health throughout, unchanged tokens for the bystander, no
error in a log, no process that dies or grows by more than 96 MiB after the first quarter, and a
verifier without sequences at the end.

Prints a table of inputs and statuses by method, and each failure with the number of its call. What
a call sends depends on the seed and its number alone: `--seed S --first-call N --inputs 1` sends it
again, alone. The exit status is 1 after a failure.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks.termination import clear_up_on_sigterm
from tests.fuzz.campaign import Report, run_campaign
from tests.fuzz.services import running_services


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="messages to send")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=24, help="calls at a time")
    parser.add_argument("--first-call", type=int, default=0, help="number of the first call")
    arguments = parser.parse_args()
    clear_up_on_sigterm()
    with tempfile.TemporaryDirectory() as folder, running_services(Path(folder)) as services:
        report = asyncio.run(
            run_campaign(
                services,
                num_inputs=arguments.inputs,
                seed=arguments.seed,
                num_at_once=arguments.at_once,
                first_call=arguments.first_call,
            )
        )
        # Before the services are stopped: that raises if one of them has died.
        _print(report)
    return 1 if report.failures else 0


def _print(report: Report) -> None:
    print(f"{'method':<52} {'inputs':>7}  calls by status")
    for method, count in sorted(report.num_inputs_by_method.items()):
        codes = sorted((code, n) for (name, code), n in report.statuses.items() if name == method)
        print(f"{method:<52} {count:>7}  {', '.join(f'{code} {n}' for code, n in codes)}")
    rate = report.num_inputs / report.duration_s
    print(f"\n{report.num_inputs} inputs in {report.duration_s:.0f} s, {rate:.0f} per second")
    print(
        f"bystander: {report.num_bystander_requests} requests, "
        f"{report.longest_bystander_s:.2f} s at the longest"
    )
    for name, growth in report.growth_bytes.items():
        print(f"{name}: {growth / (1 << 20):+.0f} MiB since the warm-up")
    for failure in report.failures:
        print(f"FAILURE {failure}", file=sys.stderr)
    print(f"{len(report.failures)} failures")


if __name__ == "__main__":
    sys.exit(main())
