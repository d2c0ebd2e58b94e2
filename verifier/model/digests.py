"""What identifies a checkpoint folder's contents."""

import hashlib
from pathlib import Path


def digest_of(folder: Path) -> str:
    """SHA-256 over weights, configuration and tokenizer, by file name and content."""
    digest = hashlib.sha256()
    names = ("config.json", "tokenizer.json")
    files = sorted([*folder.glob("*.safetensors"), *(folder / n for n in names)])
    for path in files:
        if path.exists():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def tokenizer_digest_of(folder: Path) -> str:
    """SHA-256 of the folder's tokenizer.json; "" if there is none."""
    path = folder / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
