"""`tandem up`: drafters, verifiers and a gateway as processes on this machine.

Owns the list of processes and the flags that connect them; the supervisor runs them.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem.cli.ports import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from tandem.cli.supervisor import Policy, ProcessSpec, Report, StartError, Supervisor
from tandem.cli.terminal import is_live, report
from tandem.free_ports import check_port, free_port
from tandem.ready_line import format_ready_line

if TYPE_CHECKING:
    from tandem.cli.live_output import LiveOutput

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "model"
_HOST = "127.0.0.1"
_GATEWAY = "gateway"
# How long the ready line waits for a drafter when all others serve.
_DRAFTER_PATIENCE_S = 5.0

# Of verifiers, whose package need not be here.
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# Which GPUs all verifiers see, and the variable that sets the threads of each.
_VISIBLE_DEVICES, _VERIFIER_THREADS = "CUDA_VISIBLE_DEVICES", "TANDEM_VERIFIER_THREADS"

#: What installs all services, in Tandem's source tree.
INSTALL_ALL = "pip install -e '.[all]'"
# A package that only this service's extra installs.
_REQUIRED_PACKAGES = {"drafter": "numba", "verifier": "torch", "gateway": "tokenizers"}
# What a verifier or a gateway cannot do without, as patterns.
_MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors")

EXAMPLES = (
    "tandem up",
    "tandem up --model ./my-model --num-verifiers 2 --port 0 --http-port 0",
    "TANDEM_VERIFIER_MAX_NUM_SEQS=8 TANDEM_GATEWAY_DRAFT_WAIT=never tandem up",
)


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


def command(
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="folder of a model with its tokenizer (default: the bundled one)"
        ),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="of the model (default: the verifier's)")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="of weights and K/V (default: the verifier's)")
    ] = None,
    num_verifiers: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="at least 1; with --device cuda, each has a GPU"),
    ] = 1,
    num_drafters: Annotated[int, typer.Option(min=0, metavar="N", help="0: no speculation")] = 1,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="the gateway's port for gRPC; 0 picks a free one"),
    ] = DEFAULT_GRPC_PORT,
    http_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="the gateway's port for HTTP; 0 picks a free one"),
    ] = DEFAULT_HTTP_PORT,
    allow_trace: Annotated[
        bool,
        typer.Option(
            "--allow-trace",
            help="let requests ask for a trace of every step (tandem generate --trace)",
        ),
    ] = False,
    allow_structured_output: Annotated[
        bool,
        typer.Option(
            "--allow-structured-output",
            help="let requests ask for output that follows a JSON schema or another grammar",
        ),
    ] = False,
    start_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="how long a service may take to be ready"),
    ] = Policy().start_timeout_s,
) -> int:
    """Runs drafter, verifier and gateway as processes on this machine, on loopback.

    Prints one line on stdout when the model is served: ready grpc=HOST:PORT http=HOST:PORT. The
    services' logs go to stderr; a terminal shows a table of the services below them. A process
    that dies is restarted. SIGINT or SIGTERM stops all in good order, a second one stops them at
    once.

    The services read their other options from the environment, TANDEM_<SERVICE>_<FLAG>. What up
    sets itself does not count there: the model, and all addresses of --listen, --http-listen and
    --metrics-listen. Metrics are on free ports; up prints their addresses.
    """
    if missing := missing_services():
        report(
            "up",
            f"the packages of {', '.join(missing)} are not installed: a plain install has only the "
            f"client; {INSTALL_ALL} installs everything",
        )
        return 2
    folder = model or BUNDLED_MODEL
    if missing := [name for name in _MODEL_FILES if not _has_file(folder, name)]:
        if model is None:
            report(
                "up",
                f"no --model given, and the bundled one is not at {folder}: "
                "it comes with Tandem's source tree",
            )
        elif not folder.is_dir():
            report(
                "up", f"--model: {folder} is not a folder with a model; Tandem downloads nothing"
            )
        else:
            lack = ", ".join(f"no {name}" for name in missing)
            report("up", f"--model: {folder} is not a whole model: it has {lack}")
        return 2
    topology = Topology(
        model=folder,
        device=device,
        dtype=dtype,
        num_verifiers=num_verifiers,
        num_drafters=num_drafters,
        allow_trace=allow_trace,
        allow_structured_output=allow_structured_output,
        grpc_port=port,
        http_port=http_port,
    )
    for flag, number in (("--port", port), ("--http-port", http_port)):
        try:
            check_port(number)
        except OSError as error:
            report("up", f"{flag}: 127.0.0.1:{number}: {error.strerror}; 0 picks a free port")
            return 1
    return asyncio.run(_up(topology, Policy(start_timeout_s=start_timeout)))


def _has_file(folder: Path, pattern: str) -> bool:
    return any(path.is_file() for path in folder.glob(pattern))


def missing_services() -> list[str]:
    """The services whose packages are not installed."""
    return [name for name, module in _REQUIRED_PACKAGES.items() if find_spec(module) is None]


async def _up(topology: Topology, policy: Policy) -> int:
    """Serves until a signal; returns the exit code."""
    ports = _Ports.choose(topology)
    async with _output(ports) as output:
        return await _run(topology, ports, policy, output)


@contextlib.asynccontextmanager
async def _output(ports: "_Ports") -> AsyncIterator["PlainOutput | LiveOutput"]:
    """A table of the services below their logs, or on what is no terminal just lines."""
    if not is_live(sys.stderr):
        yield PlainOutput()
        return
    from tandem.cli.live_output import LiveOutput

    async with LiveOutput(ports.names()) as output:
        yield output


class PlainOutput:
    """Lines on stderr, between those that the services write there by themselves."""

    log_descriptors: Mapping[str, int] | None = None
    """Where services write their logs, by name; None: to this process's stderr."""

    def report(self, line: str) -> None:
        report("up", line)

    def watch(self, supervisor: Supervisor) -> None:
        """Nothing is shown but lines."""


async def _run(
    topology: Topology, ports: "_Ports", policy: Policy, output: "PlainOutput | LiveOutput"
) -> int:
    supervisor = Supervisor(output.report, policy, stderr=output.log_descriptors)
    output.watch(supervisor)
    serving = asyncio.create_task(_serve(topology, ports, supervisor, output.report))

    def on_signal() -> None:
        if serving.done() or serving.cancelling():
            supervisor.kill()
        else:
            serving.cancel()
            output.report("stopping")

    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        numbers.remove(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        await asyncio.wait([serving])
    finally:
        await supervisor.stop()
    if serving.cancelled():
        return 0
    error = serving.exception()
    if not isinstance(error, StartError):
        assert error is not None, "serving ends by a signal or an error"
        raise error
    output.report(str(error))
    return 1


async def _serve(
    topology: Topology, ports: "_Ports", supervisor: Supervisor, report: Report
) -> None:
    """Starts all processes, and keeps them running until cancelled."""
    tiers = [
        topology.drafters(ports.drafters, ports.drafter_metrics),
        topology.verifiers(ports.verifiers, ports.verifier_metrics, ports.drafters),
        [topology.gateway(ports.gateway_metrics, ports.drafters, ports.verifiers)],
    ]
    report("starting " + ", ".join(spec.name for tier in tiers for spec in tier))
    # All at once: each waits for those that it calls, and loads its code and model meanwhile.
    starts = [asyncio.ensure_future(supervisor.start(tier)) for tier in tiers]
    ready = asyncio.ensure_future(_print_when_ready(*starts))
    try:
        await asyncio.gather(*starts, ready)
    finally:
        for task in (*starts, ready):
            task.cancel()
        await asyncio.gather(*starts, ready, return_exceptions=True)
    # The gateway's HTTP port has its metrics, too, but may ask for TLS, a certificate or a token.
    metrics = [ports.gateway_metrics, *ports.verifier_metrics, *ports.drafter_metrics]
    report("metrics at " + " ".join(metrics))
    await supervisor.watch()


# The addresses of a tier that is starting.
_Starting = asyncio.Future[list[dict[str, str]]]


async def _print_when_ready(drafters: _Starting, verifiers: _Starting, gateways: _Starting) -> None:
    """Prints the ready line. A drafter that compiles its kernels takes long, and is not waited for
    long: drafts only add speed. One that is nearly there is, so that the first request has drafts.
    """
    await verifiers
    [gateway] = await gateways
    await asyncio.wait([drafters], timeout=_DRAFTER_PATIENCE_S)
    # The services serve, whether or not the line can be written.
    with contextlib.suppress(OSError):
        print(format_ready_line({kind: gateway[kind] for kind in ("grpc", "http")}), flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """Free addresses for all but what the gateway serves, one of each kind per process."""

    drafters: Sequence[str]
    drafter_metrics: Sequence[str]
    verifiers: Sequence[str]
    verifier_metrics: Sequence[str]
    gateway_metrics: str

    @staticmethod
    def choose(topology: Topology) -> "_Ports":
        """Addresses that nobody listens on now, all different, and none of them the gateway's."""
        count = 2 * (topology.num_drafters + topology.num_verifiers) + 1
        own = (topology.grpc_port, topology.http_port)
        found = (f"{_HOST}:{free_port(besides=own)}" for _ in range(count))
        return _Ports(
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
