"""The control groups that limit this process, of Linux's version 1 and 2.

Knows where they are; what their files say is for whoever asks.
"""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")


def limiting_groups(controller: str, *, proc: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each group that this process is in and of those around it.

    A folder may be absent: within a container the root may be the container's own group.

    Args:
        controller: "cpu", "memory"; in version 2 all share one group.
        proc, root: `PROC` and `ROOT`, except in tests.
    """
    for membership in _lines(proc / "self/cgroup"):
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            yield from ((2, group) for group in _and_parents(root, path))
        elif controller in controllers.split(","):
            for mounted in {root / controllers, root / controller}:
                yield from ((1, group) for group in _and_parents(mounted, path))


def words(path: Path) -> list[str]:
    """What a file says, split at white space; nothing if it cannot be read."""
    return " ".join(_lines(path)).split()


def _and_parents(root: Path, path: str) -> Iterator[Path]:
    group = root
    yield group
    for part in path.strip("/").split("/"):
        if part:
            group = group / part
            yield group


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
