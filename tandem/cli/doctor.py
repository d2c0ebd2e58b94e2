"""`tandem doctor`: what is wrong with this machine, a model or a gateway, and what to do.

Owns the flags, the order of the checks and the report.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli import version
from tandem.cli.checks import machine_checks, target_checks
from tandem.cli.checks.check import Check, Status, fail, ok, warn
from tandem.cli.connection_flags import ConnectionFlags
from tandem.cli.flag_groups import with_flag_groups
from tandem.cli.ports import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from tandem.cli.terminal import has_colour, printable, waiting_for
from tandem.cli.up import BUNDLED_MODEL
from tandem.transport.channel import parse_targets

EXAMPLES = (
    "tandem doctor",
    "tandem doctor --model ./my-model --json",
    "tandem doctor --target gateway-0:50050,gateway-1:50050 --tls-ca ca.pem",
)

_COLOURS = {Status.OK: "\x1b[32m", Status.WARN: "\x1b[33m", Status.FAIL: "\x1b[1;31m"}
_PLAIN = "\x1b[0m"


@with_flag_groups
def command(
    *,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="folder of a model, or a GGUF file (default: the bundled one)"
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="for gRPC, that tandem up shall use")
    ] = DEFAULT_GRPC_PORT,
    http_port: Annotated[
        int, typer.Option(min=1, max=65535, help="for HTTP, that tandem up shall use")
    ] = DEFAULT_HTTP_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    connection: ConnectionFlags,
) -> int:
    """Checks versions, model, memory, processor, GPU, ports and gateways; says what to do.

    Each line begins with ok, warn or fail. The exit code is 1 if one failed. A gateway that nobody
    named with --target may be absent.
    """
    found: list[Check] = []
    try:
        for check in _checks(model, port, http_port, connection):
            found.append(check)
            if not as_json:
                _print(check)
    except BrokenPipeError:
        pass  # the reader of stdout has closed it
    has_failed = any(check.status is Status.FAIL for check in found)
    if as_json:
        checks = [dataclasses.asdict(check) for check in found]
        print(json.dumps({"ok": not has_failed, "checks": checks}))
    return 1 if has_failed else 0


def _checks(
    model: Path | None, port: int, http_port: int, connection: ConnectionFlags
) -> Iterator[Check]:
    yield ok("tandem", version())
    yield from machine_checks.versions()
    yield machine_checks.processor()
    yield machine_checks.port("port", port)
    yield machine_checks.port("http-port", http_port)
    if model is not None or BUNDLED_MODEL.is_dir():
        yield from _model_checks(model or BUNDLED_MODEL)
    else:
        yield warn(
            "model", f"the bundled one is not at {BUNDLED_MODEL}", "name a model with --model"
        )
    yield from _target_checks(connection)


def _model_checks(folder: Path) -> Iterator[Check]:
    files = list(machine_checks.model_files(folder))
    yield from files
    if any(check.status is not Status.OK for check in files):
        return
    yield from machine_checks.sampling(folder)
    with waiting_for("the verifier's view of the model"):
        refusal, description = machine_checks.describe(folder)
    if refusal is None:
        yield from machine_checks.described(description)
    else:
        yield refusal


def _target_checks(connection: ConnectionFlags) -> Iterator[Check]:
    try:
        token, tls = connection.token(), connection.tls_options()
    except (OSError, ValueError) as error:
        yield fail("token-file", str(error), "name a file of text that can be read")
        return
    try:
        addresses = parse_targets(connection.target)
    except ValueError as error:
        yield fail("target", str(error), "name gateways as HOST:PORT, separated by commas")
        return
    for address in addresses:
        with waiting_for(address):
            checks = list(
                target_checks.target(
                    address,
                    tls=tls,
                    token=token,
                    allow_plaintext_token=connection.allow_plaintext_token,
                    is_expected=connection.named_target is not None,
                )
            )
        yield from checks


def _print(check: Check) -> None:
    status = f"{check.status:<4}"
    if has_colour(sys.stdout):
        status = f"{_COLOURS[check.status]}{status}{_PLAIN}"
    line = f"{check.name}: {check.found}"
    if check.advice:
        line += f"; {check.advice}"
    print(status, printable(" ".join(line.split())), flush=True)
