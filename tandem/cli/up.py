"""`tandem up`: drafters, verifiers and a gateway as processes on this machine.

Owns the flags and the order of start and end; `processes/` has the processes.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.model_path import is_gguf
from tandem.cli.ports import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from tandem.cli.processes.supervisor import Policy, Report, StartError, Supervisor
from tandem.cli.processes.topology import Device, Dtype, Ports, Topology
from tandem.cli.terminal import is_live, report
from tandem.free_ports import check_port
from tandem.ready_line import format_ready_line

if TYPE_CHECKING:
    from tandem.cli.processes.live_output import LiveOutput

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "model"
# How long the ready line waits for a drafter when all others serve.
_DRAFTER_PATIENCE_S = 5.0

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


def command(
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="folder of a model with its tokenizer, or a GGUF file (default: the bundled one)",
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
    missing = [name for name in _MODEL_FILES if not _has_file(folder, name)]
    if missing and not is_gguf(folder):
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
    ports = Ports.choose(topology)
    async with _output(ports) as output:
        return await _run(topology, ports, policy, output)


@contextlib.asynccontextmanager
async def _output(ports: Ports) -> AsyncIterator["PlainOutput | LiveOutput"]:
    """A table of the services below their logs, or on what is no terminal just lines."""
    if not is_live(sys.stderr):
        yield PlainOutput()
        return
    from tandem.cli.processes.live_output import LiveOutput

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
    topology: Topology, ports: Ports, policy: Policy, output: "PlainOutput | LiveOutput"
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


async def _serve(topology: Topology, ports: Ports, supervisor: Supervisor, report: Report) -> None:
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
