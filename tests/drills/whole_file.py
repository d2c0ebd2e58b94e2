"""Files that somebody reads, or whose writer may be killed, while they are written."""

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file; whoever reads it meanwhile gets the old content or the new."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content)
    beside.replace(path)
