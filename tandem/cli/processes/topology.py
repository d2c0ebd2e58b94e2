"""Which processes `tandem up` runs, with which flags, and on which addresses."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.cli.ports import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from tandem.cli.processes.supervisor import ProcessSpec
from tandem.free_ports import free_port

_HOST = "127.0.0.1"
_GATEWAY = "gateway"

# Of verifiers, whose package need not be here.
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Which GPUs all verifiers see, and the variable that sets the threads of each.
_VISIBLE_DEVICES, _VERIFIER_THREADS = "CUDA_VISIBLE_DEVICES", "TANDEM_VERIFIER_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The processes to run. All listen on loopback."""

    model: Path
    device: Device | None = None
    """None is the verifier's default; so for `dtype`."""
    dtype: Dtype | None = None
    num_verifiers: int = 1
    num_drafters: int = 1
    allow_trace: bool = False
    """Whether requests may ask for traces."""
    allow_structured_output: bool = False
    """Whether requests may ask for output that follows a grammar."""
    grpc_port: int = DEFAULT_GRPC_PORT
    """Of the gateway, as `http_port`; 0 picks a free one."""
    http_port: int = DEFAULT_HTTP_PORT

    def drafters(self, addresses: Sequence[str], metrics: Sequence[str]) -> list[ProcessSpec]:
        """Drafters that listen on these addresses, and serve their metrics at the others."""
        return [
            ProcessSpec(
                name=_drafter_name(index),
                command=_service("drafter", metrics_address),
                listen={"grpc": address},
            )
            for index, (address, metrics_address) in enumerate(zip(addresses, metrics, strict=True))
        ]

    def verifiers(
        self, addresses: Sequence[str], metrics: Sequence[str], drafters: Sequence[str]
    ) -> list[ProcessSpec]:
        """Verifiers as `drafters`, which may call these drafters."""
        options = ["--model", str(self.model), *_drafters(drafters)]
        options += ["--device", self.device] if self.device else []
        options += ["--dtype", self.dtype] if self.dtype else []
        options += ["--allow-trace"] if self.allow_trace else []
        options += ["--allow-structured-output"] if self.allow_structured_output else []
        return [
            ProcessSpec(
                name=_verifier_name(index),
                command=_service("verifier", metrics_address, *options),
                environment=part,
                listen={"grpc": address},
            )
            for index, (address, metrics_address, part) in enumerate(
                zip(addresses, metrics, self._parts(), strict=True)
            )
        ]

    def _parts(self) -> list[dict[str, str]]:
        """Which part of the machine each verifier has, if there are several, as variables."""
        count = self.num_verifiers
        if count == 1:
            return [{}]
        if self.device == "cuda":
            visible = os.environ.get(_VISIBLE_DEVICES)
            devices = visible.split(",") if visible else list(map(str, range(count)))
            # One verifier each; if there are too few, several verifiers share one.
            return [{_VISIBLE_DEVICES: devices[index % len(devices)]} for index in range(count)]
        if _VERIFIER_THREADS in os.environ:
            return [{}] * count
        # One core is left to the services beside them, as a single one leaves it.
        num_threads = max(1, (_num_cores() - 1) // count)
        return [{_VERIFIER_THREADS: str(num_threads)}] * count

    def gateway(
        self, metrics_address: str, drafters: Sequence[str], verifiers: Sequence[str]
    ) -> ProcessSpec:
        """The gateway that connects to these verifiers, and has them call these drafters."""
        options = ["--verifiers", ",".join(verifiers), "--tokenizer", str(self.model)]
        options += _drafters(drafters)
        options += ["--allow-trace"] if self.allow_trace else []
        return ProcessSpec(
            name=_GATEWAY,
            command=_service("gateway", metrics_address, *options),
            listen_flags={"grpc": "--listen", "http": "--http-listen"},
            listen={"grpc": f"{_HOST}:{self.grpc_port}", "http": f"{_HOST}:{self.http_port}"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Free addresses for all but what the gateway serves, one of each kind per process."""

    drafters: Sequence[str]
    drafter_metrics: Sequence[str]
    verifiers: Sequence[str]
    verifier_metrics: Sequence[str]
    gateway_metrics: str

    @staticmethod
    def choose(topology: Topology) -> "Ports":
        """Addresses that nobody listens on now, all different, and none of them the gateway's."""
        count = 2 * (topology.num_drafters + topology.num_verifiers) + 1
        own = (topology.grpc_port, topology.http_port)
        found = (f"{_HOST}:{free_port(besides=own)}" for _ in range(count))
        return Ports(
            drafters=list(itertools.islice(found, topology.num_drafters)),
            drafter_metrics=list(itertools.islice(found, topology.num_drafters)),
            verifiers=list(itertools.islice(found, topology.num_verifiers)),
            verifier_metrics=list(itertools.islice(found, topology.num_verifiers)),
            gateway_metrics=next(found),
        )

    def names(self) -> list[str]:
        """Of all processes."""
        return [
            *(_drafter_name(index) for index in range(len(self.drafter_metrics))),
            *(_verifier_name(index) for index in range(len(self.verifier_metrics))),
            _GATEWAY,
        ]


def _drafter_name(index: int) -> str:
    return f"drafter-{index}"


def _verifier_name(index: int) -> str:
    return f"verifier-{index}"


def _drafters(addresses: Sequence[str]) -> list[str]:
    return ["--drafters", ",".join(addresses)] if addresses else []


def _num_cores() -> int:
    """Those that services may use, as they count them themselves."""
    command = [sys.executable, "-m", "servicekit.cores"]
    # Ctrl-C in a terminal is for this process only.
    return int(subprocess.check_output(command, process_group=0))


def _service(module: str, metrics_address: str, *options: str) -> list[str]:
    return [sys.executable, "-m", module, "--metrics-listen", metrics_address, *options]
