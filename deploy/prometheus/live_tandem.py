"""A running Tandem for a Prometheus to scrape: two verifiers, a drafter and a gateway, on loopback.

For tests, and for the pictures in the docs.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.services import Service, running_process
from benchmarks.workloads import BUNDLED_MODEL

# Each has a peer that it is compared with.
_NUM_VERIFIERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTandem:
    """The processes of the three services."""

    drafter: Service
    verifiers: Sequence[Service]
    gateway: Service

    def targets(self) -> dict[str, list[str]]:
        """The metrics' addresses by job name of `prometheus.yml`."""
        return {
            "tandem-drafter": [self.drafter.metrics],
            "tandem-verifier": [verifier.metrics for verifier in self.verifiers],
            "tandem-gateway": [self.gateway.metrics],
        }


@contextlib.contextmanager
def live_tandem(flags: Mapping[str, Sequence[str]] | None = None) -> Iterator[LiveTandem]:
    """Starts the services with the bundled model; stops them on exit.

    Args:
        flags: further flags, by service.

    Raises:
        ServiceError: a service ended before it was ready; stderr says why.
    """
    flags = flags or {}
    model = str(BUNDLED_MODEL)
    with contextlib.ExitStack() as stack:

        def start(name: str, *own: str) -> Service:
            return stack.enter_context(running_process(name, *own, *flags.get(name, ())))

        drafter = start("drafter")
        drafters = ("--drafters", drafter.address)
        verifiers = [
            start("verifier", "--model", model, "--threads", "1", *drafters)
            for _ in range(_NUM_VERIFIERS)
        ]
        gateway = start(
            "gateway",
            *("--tokenizer", model, "--http-listen", "127.0.0.1:0", *drafters),
            *("--verifiers", ",".join(verifier.address for verifier in verifiers)),
        )
        yield LiveTandem(drafter=drafter, verifiers=verifiers, gateway=gateway)
