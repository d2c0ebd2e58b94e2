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
    # Said before the installation starts.
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A system, run by the module `benchmarks.peers.workers.<worker>`."""

    name: str
    worker: str
    # None: runs in the benchmark's own environment.
    package: Package | None = None
    dtypes: Sequence[str] = ("float32", "bfloat16")
    speculates: bool = False
    # Most tokens that its prompt lookup drafts; 0: it has none.
    max_lookup: int = 0
    looks_up_in_batches: bool = False

    def modes(self, streams: int, lookups: Sequence[int]) -> list[str]:
        """Returns what it can do with so many streams; `lookups`: numbers of tokens to draft."""
        modes = [SPECULATION] if self.speculates else []
        modes.append(PLAIN)
        if self.max_lookup and (streams == 1 or self.looks_up_in_batches):
            for tokens in sorted({min(tokens, self.max_lookup) for tokens in lookups}):
                modes.append(f"{LOOKUP}{tokens}")
        return modes


TANDEM = "tandem"
TRANSFORMERS = "transformers"

PEERS = [
    Peer(name=TANDEM, worker="tandem", speculates=True),
    Peer(name="tandem-services", worker="services", speculates=True),
    Peer(
        name="openvino",
        worker="openvino",
        package=Package(
            version="2026.4.1.0",
            requirements=(
                *("openvino-genai==2026.4.1.0", "openvino==2026.4.1"),
                *("openvino-tokenizers==2026.4.1.0", "numpy==2.4.6"),
            ),
            # Starts a process at import, which reports to its maker.
            unwanted=("openvino-telemetry",),
        ),
        max_lookup=1 << 10,
        looks_up_in_batches=True,
    ),
    Peer(
        name="llama.cpp",
        worker="llama_cpp",
        package=Package(
            version="0.3.36",
            requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6"),
            remark="compiled for this processor: some ten minutes, and needs a C++ compiler",
        ),
        max_lookup=1 << 10,
        looks_up_in_batches=True,
    ),
    Peer(
        name="onnxruntime-genai",
        worker="onnxruntime",
        package=Package(
            version="0.18.0",
            requirements=(
                *("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "numpy==2.4.6"),
                # For its model builder.
                *("onnx==1.23.2", "onnx-ir==1.1.0"),
            ),
        ),
        # Its model builder has no bfloat16 for a CPU.
        dtypes=("float32",),
        max_lookup=16,
    ),
    Peer(name=TRANSFORMERS, worker="transformers", max_lookup=1 << 10),
]
