"""What identifies a checkpoint folder's contents."""

import hashlib
import threading
from concurrent.futures import Future
from pathlib import Path

from verifier.checkpoint.refusals import CheckpointError


def digest_of(folder: Path) -> str:
    """SHA-256 over weights, configuration and tokenizer, by file name and content.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(f"{path.name} {_digest_of_file(path)}\n".encode())
    return digest.hexdigest()


def identity_on_this_machine(folder: Path) -> str:
    """Equal for two processes of a machine that read the same files: SHA-256 over what the file
    system says of the files of `digest_of`, none of which is read.
    """
    digest = hashlib.sha256()
    for path in _files(folder):
        state = path.stat()
        told = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        digest.update(f"{path.name} {told}\n".encode())
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
    """SHA-256 of the folder's tokenizer.json; "" if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    return _digest_of_file(path) if path.exists() else ""


def _files(folder: Path) -> list[Path]:
    # The index says which shard's weights count, where several have them.
    names = ("config.json", "tokenizer.json", "model.safetensors.index.json")
    found = [*folder.glob("*.safetensors"), *folder.glob("*.gguf"), *(folder / n for n in names)]
    return sorted(path for path in found if path.exists())


def _digest_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
