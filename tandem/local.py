"""All services on this machine during a `with` block, for examples, benchmarks and tests.

    with local_tandem() as addresses, TandemClient(addresses["grpc"]) as client:
        ...

Owns one `tandem up` process on free ports.
"""

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tandem.ready_line import parse_ready_line

# `tandem up` bounds its own stop; this bounds one that hangs.
_STOP_TIMEOUT_S = 120.0


class LocalTandemError(Exception):
    """`tandem up` ended before it was ready."""


@contextlib.contextmanager
def local_tandem(
    *,
    model: Path | None = None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Iterator[dict[str, str]]:
    """Starts all services, yields the gateway's addresses ("grpc", "http"), stops them.

    Args:
        model: a model folder; None is the bundled one.
        options: further flags of `tandem up`.
        environ: the environment, which the services read their options from; None is this
            process's.
        quiet: prints the services' logs only if the start or the block fails; otherwise they go
            to stderr at once.

    Raises:
        LocalTandemError: a service did not start; the logs say which.
    """
    command = [sys.executable, "-m", "tandem", "up", "--port", "0", "--http-port", "0", *options]
    if model is not None:
        command += ["--model", str(model)]
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryFile("w+")) if quiet else None
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=logs, text=True, env=environ)
        )
        stack.callback(_stop, process)
        try:
            assert process.stdout is not None
            # `tandem up` bounds the start of every service, so this does not wait forever.
            addresses = parse_ready_line(process.stdout.readline())
            if addresses is None:
                raise LocalTandemError(f"`{shlex.join(command)}` ended with {process.wait()}")
            yield addresses
        except Exception:
            if logs is not None:
                logs.seek(0)
                shutil.copyfileobj(logs, sys.stderr)
            raise


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children die with it
