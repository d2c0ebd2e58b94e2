"""A stand-in for any of the three services, to be started as `python -m drafter` and the like.

Copied under the service's name into a folder on the path. It really listens on the addresses it is
given, prints the ready line, and tells what happens to it as JSON lines on stderr. A file beside it
makes it misbehave:

    NAME.fails      it exits with status 3 at once
    NAME.stubborn   it ignores SIGTERM
    NAME.silent     it never gets ready
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

NAME = Path(sys.argv[0]).stem


def tell(event: str, **more: object) -> None:
    told = {"stand_in": NAME, "pid": os.getpid(), "event": event, **more}
    # In one write, so that lines of several processes do not mix.
    os.write(sys.stderr.fileno(), f"{json.dumps(told)}\n".encode())


def am(kind: str) -> bool:
    return Path(sys.argv[0]).with_suffix(f".{kind}").exists()


def listen(flag: str) -> tuple[socket.socket, str]:
    host, port = sys.argv[sys.argv.index(flag) + 1].split(":")
    server = socket.create_server((host, int(port)))
    return server, f"{host}:{server.getsockname()[1]}"


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    tell("started", argv=sys.argv[1:])
    if am("fails"):
        return 3
    if am("silent"):
        signal.pause()
    servers = [(kind, *listen(flag)) for kind, flag in KINDS if flag in sys.argv]
    print("hello from", NAME)
    print("ready", *(f"{kind}={address}" for kind, _, address in servers), flush=True)
    signal.sigwait({signal.SIGTERM})
    tell("stopping")
    if am("stubborn"):
        signal.pause()
    return 0


KINDS = (("grpc", "--listen"), ("http", "--http-listen"))

if __name__ == "__main__":
    sys.exit(main())
