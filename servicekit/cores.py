"""How many cores this process may use: its affinity, and its container's quota."""

import os
from pathlib import Path


def available_cores(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Whole cores, at least 1.

    Reads the limits of the control group and of those around it, of version 2 (cpu.max) and of
    version 1 (cpu.cfs_quota_us).
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    memberships = _words(proc / "self/cgroup", "\n")
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            limits += [_version_2(group) for group in _and_parents(groups, path)]
        elif "cpu" in controllers.split(","):
            for root in {groups / controllers, groups / "cpu"}:
                limits += [_version_1(group) for group in _and_parents(root, path)]
    return max(1, int(min(limits)))


def _and_parents(root: Path, path: str) -> list[Path]:
    """A group and all above it. Within a container, the root may be the container's own group."""
    result = [root]
    for part in path.strip("/").split("/"):
        result.append(result[-1] / part)
    return result


def _version_2(group: Path) -> float:
    match _words(group / "cpu.max"):
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    return float("inf")


def _version_1(group: Path) -> float:
    match _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us"):
        case [[quota], [period]] if int(quota) > 0:
            return int(quota) / int(period)
    return float("inf")


def _words(path: Path, separator: str | None = None) -> list[str]:
    try:
        return path.read_text().strip().split(separator)
    except OSError:
        return []
