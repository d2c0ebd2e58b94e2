"""Cores are counted as the container's limit and the affinity allow."""

import os
from pathlib import Path

import pytest

from servicekit.cores import available_cores


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def cores(folder: Path, membership: str, limits: dict[str, str]) -> int:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(membership)
    for name, text in limits.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_cores(folder / "proc", folder / "groups")


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "500000 100000", "cpu.max": "900000 100000"}, 5),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "400000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            16,
        ),
    ],
)
def test_the_smallest_limit_counts(
    membership: str, limits: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert cores(tmp_path, membership, limits) == expected


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cores(tmp_path, tmp_path) == 16
