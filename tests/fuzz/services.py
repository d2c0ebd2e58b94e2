"""Runs the services as processes.

Their bounds are small, so that a short campaign reaches them.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.services import ServiceError
from benchmarks.workloads import BUNDLED_MODEL
from tests.drills.fleet import Member
from tests.fuzz.messages import ABSENT_DRAFTER

_DRAFTER_FLAGS = (*("--max-history-bytes", str(32 << 20), "--max-pools-bytes", str(128 << 20)),)
_VERIFIER_FLAGS = (*("--model", str(BUNDLED_MODEL), "--threads", "1", "--num-kv-blocks", "1024"),)


@contextlib.contextmanager
def running_services(folder: Path) -> Iterator[list[Member]]:
    """A drafter, a verifier with the bundled model and a gateway, on free ports; stopped on exit.

    Args:
        folder: for their logs.

    Raises:
        ServiceError: a service ended before it was ready, or did not end properly.
    """
    drafter = Member("drafter", "drafter", _DRAFTER_FLAGS, folder)
    drafters = f"{drafter.address},{ABSENT_DRAFTER}"
    verifier_flags = ("--drafters", drafters, *_VERIFIER_FLAGS)
    verifier = Member("verifier", "verifier", verifier_flags, folder)
    gateway_flags = (
        *("--http-listen", "127.0.0.1:0", "--tokenizer", str(BUNDLED_MODEL)),
        *("--drafters", drafter.address, "--verifiers", verifier.address),
    )
    gateway = Member("gateway", "gateway", gateway_flags, folder)
    with contextlib.ExitStack() as exits:
        for member in (drafter, verifier, gateway):
            exits.callback(_stop, member)
            member.start()
        yield [drafter, verifier, gateway]


def _stop(member: Member) -> None:
    if status := member.stop():
        raise ServiceError(f"{member.name} ended with status {status}")
