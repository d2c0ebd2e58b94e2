"""Runs a command in this process's place, so that the kernel kills it when its parent dies.

    python -I -S death_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

`dying_with_parent` makes this command. To set the signal in a `preexec_fn` instead would force
Python to fork where it otherwise calls vfork, and the handlers that gRPC runs in a forked child
start its threads there, which abort once their descriptors are closed.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command that runs `command`; on Linux, the kernel kills it once this process is dead."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Arms the signal, which survives exec, and executes the command.

    Raises:
        OSError: the command could not be executed.
    """
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call.
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
