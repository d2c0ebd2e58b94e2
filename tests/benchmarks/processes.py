"""Which processes run, by what Linux says of them."""

from pathlib import Path


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    # Nobody may have asked yet for the status of one that has ended.
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
