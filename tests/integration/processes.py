"""Services as processes of their own, for tests that kill them."""

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tandem.ready_line import parse_ready_line
from tests.integration.stack import MODEL, REPOSITORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process that serves, and its addresses by kind ("grpc", "http")."""

    process: "subprocess.Popen[str]"
    addresses: dict[str, str]

    @property
    def address(self) -> str:
        return self.addresses["grpc"]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; of gateways, which serve metrics over HTTP."""
        url = f"http://{self.addresses['http']}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            families = text_string_to_metric_families(response.read().decode())
            samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)


@contextlib.contextmanager
def service(name: str, *flags: str) -> Iterator[Service]:
    """Starts `python -m NAME`, waits until it serves, and kills it at the end."""
    command = [
        sys.executable,
        "-m",
        name,
        "--listen",
        "127.0.0.1:0",
        "--metrics-listen",
        "",
        *flags,
    ]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = parse_ready_line(process.stdout.readline())
            assert addresses is not None, f"{name} ended with {process.wait()}"
            yield Service(process=process, addresses=addresses)
        finally:
            process.kill()


@contextlib.contextmanager
def verifier_with_drafter() -> Iterator[tuple[Service, Service]]:
    """A verifier of the bundled model, and the drafter that it may call."""
    with (
        service("drafter") as drafter,
        service(
            *("verifier", "--model", str(MODEL), "--threads", "1", "--num-kv-blocks", "2048"),
            *("--drafters", drafter.address, "--draft-deadline-s", "60"),
            *("--speculation-depth", "limits"),
        ) as verifier,
    ):
        yield verifier, drafter


def gateway(
    verifier: Service, drafter: Service, *flags: str
) -> "contextlib.AbstractContextManager[Service]":
    """A gateway of them, with HTTP. Every step waits for its drafts: see `EVERY_DRAFT`."""
    return service(
        *("gateway", "--http-listen", "127.0.0.1:0", "--tokenizer", str(MODEL)),
        *("--draft-wait", "always"),
        *("--verifiers", verifier.address, "--drafters", drafter.address),
        *flags,
    )
