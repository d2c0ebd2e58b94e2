"""What a --model may be. What is in it, the services find out."""

from pathlib import Path


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file, or a folder with one and no other model."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.is_file()
