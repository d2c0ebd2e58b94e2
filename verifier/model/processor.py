"""What the system says of the processor. Knows no library, so that it can be asked before any."""

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_lines(path: Path = _CPUINFO) -> dict[str, str]:
    """The first processor's description, by key; empty where there is none."""
    if not path.exists():
        return {}
    first = path.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
