"""How many cores this process may use: its affinity, and its container's quota.

`python -m servicekit.cores` prints it.
"""

import os
from pathlib import Path

from servicekit.control_groups import PROC, ROOT, limiting_groups, words


def available_cores(proc: Path = PROC, groups: Path = ROOT) -> int:
    """Whole cores, at least 1.

    Reads the limits of the control group and of those around it, of version 2 (cpu.max) and of
    version 1 (cpu.cfs_quota_us).
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for version, group in limiting_groups("cpu", proc=proc, root=groups):
        limits.append(_version_2(group) if version == 2 else _version_1(group))
    return max(1, int(min(limits)))


def _version_2(group: Path) -> float:
    match words(group / "cpu.max"):
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    return float("inf")


def _version_1(group: Path) -> float:
    match words(group / "cpu.cfs_quota_us"), words(group / "cpu.cfs_period_us"):
        case [[quota], [period]] if int(quota) > 0:
            return int(quota) / int(period)
    return float("inf")


if __name__ == "__main__":
    print(available_cores())
