"""The systems that are compared: where each comes from, and what it can do."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.protocol import LOOKUP, PLAIN, SPECULATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A peer's own environment, installed with pip."""

    version: str
    requirements: Sequence[str]
    # Uninstalled again.
    unwanted: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A system that is measured."""

    name: str
    # The module that runs it and answers `protocol`.
    worker: str
    # None: runs in the benchmark's own environment.
    package: Package | None = None
    # Whether it is Tandem, which drafts in its own way; others look prompts up.
    is_tandem: bool = False
    looks_up_in_batches: bool = False

    def modes(self, streams: int, lookups: Sequence[int]) -> list[str]:
        """What it can do with so many streams; `lookups`: numbers of tokens to draft."""
        if self.is_tandem:
            return [SPECULATION, PLAIN]
        if streams > 1 and not self.looks_up_in_batches:
            return [PLAIN]
        return [PLAIN, *(f"{LOOKUP}{tokens}" for tokens in lookups)]


TANDEM = Peer(name="tandem", worker="benchmarks.peers.workers.tandem", is_tandem=True)
TRANSFORMERS = Peer(name="transformers", worker="benchmarks.peers.workers.transformers")
PEERS = {
    peer.name: peer
    for peer in (
        TANDEM,
        Peer(name="tandem-services", worker="benchmarks.peers.workers.services", is_tandem=True),
        Peer(
            name="openvino",
            worker="benchmarks.peers.workers.openvino",
            package=Package(
                version="2026.4.1.0",
                requirements=(
                    *("openvino-genai==2026.4.1.0", "openvino==2026.4.1"),
                    *("openvino-tokenizers==2026.4.1.0", "numpy==2.4.6"),
                ),
                # Starts a process at import, which reports to its maker.
                unwanted=("openvino-telemetry",),
            ),
            looks_up_in_batches=True,
        ),
        TRANSFORMERS,
    )
}
