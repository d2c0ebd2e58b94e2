"""Environments of the peers: made on demand from PyPI, as pip is configured, and kept."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.catalogue import Peer

_COMPLETE = "complete"


class InstallError(Exception):
    """A peer's environment could not be made; the message contains the end of pip's output."""


def python_of(peer: Peer, cache: Path, say: Callable[[str], None]) -> Path:
    """Returns the interpreter that runs a peer's worker; installs the peer if it is not there.

    Raises:
        InstallError: pip failed.
    """
    package = peer.package
    if package is None:
        return Path(sys.executable)
    folder = cache / f"{peer.name}-{package.version}"
    python = folder / "bin" / "python"
    complete = folder / _COMPLETE
    wanted = "\n".join(package.requirements)
    if complete.exists() and complete.read_text() == wanted:
        return python
    say(f"installs {peer.name} {package.version} in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([*pip, "install", *package.requirements])
    for name in package.unwanted:
        _run([*pip, "uninstall", "-y", name])
    complete.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    # Packages of the benchmark's environment stay out.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise InstallError(f"{' '.join(command)} failed:\n{done.stdout[-1500:]}")
