"""A stand-in for any of the three services, to be started as `python -m drafter` and the like.

Copied under the service's name into a folder on the path. It listens on the addresses that it is
given, prints the ready line, and logs its start and stop as JSON lines on stderr. A file beside it
makes it misbehave:

    NAME.fails      it exits with status 3 at once
    NAME.stubborn   it ignores SIGTERM
    NAME.silent     it never prints the ready line
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

NAME = Path(sys.argv[0]).stem


def log_event(event: str, **more: object) -> None:
    entry = {"stand_in": NAME, "pid": os.getpid(), "event": event, **more}
    # In one write, so that lines of several processes do not mix.
    os.write(sys.stderr.fileno(), f"{json.dumps(entry)}\n".encode())


def has_file(kind: str) -> bool:
    return Path(sys.argv[0]).with_suffix(f".{kind}").exists()


def listen(flag: str) -> tuple[socket.socket, str]:
    host, port = sys.argv[sys.argv.index(flag) + 1].split(":")
    server = socket.create_server((host, int(port)))
    return server, f"{host}:{server.getsockname()[1]}"


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    log_event("started", argv=sys.argv[1:])
    if has_file("fails"):
        return 3
    if has_file("silent"):
        signal.pause()
    servers = [(kind, *listen(flag)) for kind, flag in KINDS if flag in sys.argv]
    print("hello from", NAME)
    print("ready", *(f"{kind}={address}" for kind, _, address in servers), flush=True)
    signal.sigwait({signal.SIGTERM})
    log_event("stopping")
    if has_file("stubborn"):
        signal.pause()
    return 0


KINDS = (("grpc", "--listen"), ("http", "--http-listen"))

if __name__ == "__main__":
    sys.exit(main())
