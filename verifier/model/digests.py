"""What identifies a checkpoint folder's contents."""

import hashlib
import threading
from concurrent.futures import Future
from pathlib import Path


def digest_of(folder: Path) -> str:
    """SHA-256 over weights, configuration and tokenizer, by file name and content."""
    digest = hashlib.sha256()
    # The index says which shard's weights count, where several have them.
    names = ("config.json", "tokenizer.json", "model.safetensors.index.json")
    files = sorted([*folder.glob("*.safetensors"), *(folder / n for n in names)])
    for path in files:
        if path.exists():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def begin_digest(folder: Path) -> Future[str]:
    """`digest_of` in a thread of its own, beside the loading of the weights.

    Both read the same files in about the same order: what one of them has read from the disk, the
    other finds in memory, also if the whole checkpoint does not fit there. The thread ends with the
    process.
    """
    digest: Future[str] = Future()

    def compute() -> None:
        try:
            digest.set_result(digest_of(folder))
        except BaseException as error:
            digest.set_exception(error)

    threading.Thread(target=compute, name="digest", daemon=True).start()
    return digest


def tokenizer_digest_of(folder: Path) -> str:
    """SHA-256 of the folder's tokenizer.json; "" if there is none."""
    path = folder / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
