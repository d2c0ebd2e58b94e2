"""Verifiers of several ranks, each a process, started quickly.

A fork server that has imported everything takes the place of torchrun: it starts the ranks with
the variables that torchrun would set, and this process keeps the store.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess

import torch.distributed as dist

from verifier.__main__ import main

PATIENCE_S = 200.0

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "pytest",
        "tests.verifier.tensor_parallel.parallel_verifier",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


class Rank:
    """`python -m verifier` with torchrun's variables."""

    def __init__(self, flags: list[str], environ: dict[str, str]) -> None:
        self._stdout, stdout = socket.socketpair()
        self._stderr, stderr = socket.socketpair()
        for end in (self._stdout, self._stderr):
            end.settimeout(PATIENCE_S)
        self._process: ForkServerProcess = FORK_SERVER.Process(
            target=_run, args=(flags, environ, stdout, stderr), daemon=True
        )
        self._process.start()
        stdout.close()
        stderr.close()
        self._lines = self._stdout.makefile("r")

    def address(self) -> str:
        """Waits for the ready line."""
        line = self._lines.readline()
        assert line.startswith("ready grpc="), line
        return line.strip().removeprefix("ready grpc=")

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        assert code is not None, "the process has not ended"
        return code

    def log(self) -> str:
        """All of stderr; waits for its end."""
        with self._stderr.makefile("r", errors="replace") as lines:
            return lines.read()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._lines.close()
        self._stdout.close()
        self._stderr.close()


@contextlib.contextmanager
def start_ranks(
    size: int, *flags: str, flags_by_rank: dict[int, list[str]] | None = None
) -> Iterator[list[Rank]]:
    """Starts `size` ranks; kills those that still run at the end."""
    # As torchrun's agent does for the ranks.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(size):
            environ = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
            }
            own = (flags_by_rank or {}).get(rank, [])
            ranks.append(Rank([*flags, *own], environ))
            stack.callback(ranks[-1].close)
        yield ranks


def _run(
    flags: list[str], environ: dict[str, str], stdout: socket.socket, stderr: socket.socket
) -> None:
    os.environ.update(environ)
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["verifier", *flags]
    sys.exit(main())
