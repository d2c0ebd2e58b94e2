"""The format of pools on disk: one file per pool, written whole or not at all.

A file is refused unless it is exactly as it was written. The age of a text is stored as a duration,
so clocks may differ, and time between two runs does not age it. Does not know when snapshots are
taken (`snapshotter.py`).

    "TNDMPOOL"  version  header length  header           token ids       BLAKE2b-256 of all before
    8 bytes     uint32   uint32         JSON, UTF-8      uint32 each     32 bytes

    header  {"pool_id", "ngram_mask", "texts": [record, ...]}
    record  [num_tokens, age_s, feed_key in hex], see `PoolText`

Texts are in the order of feeding; numbers are little-endian.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.pool_index.records import MAX_POOL_BYTES, PoolText

MAGIC = b"TNDMPOOL"
VERSION = 3
SUFFIX = ".pool"
_PARTIAL_SUFFIX = ".partial"

_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32
# Texts whose records are encoded at a time: JSON encoding holds the interpreter's lock.
_RECORDS_TOGETHER = 1024
# Tokens use only a part of a pool's bytes; the header of very short texts a few times as much.
_MAX_FILE_BYTES = 2 * MAX_POOL_BYTES


class DamagedSnapshotError(Exception):
    """A file is not a snapshot that this version wrote."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


def path_of(folder: Path, pool_id: str, taken: Iterable[Path] = ()) -> Path:
    """Returns the path of a pool's snapshot, other than those that are taken.

    A pool's id may contain anything, so it is hashed.
    """
    digest = hashlib.blake2b(pool_id.encode(), digest_size=16).hexdigest()
    path = folder / f"{digest}{SUFFIX}"
    number = 1
    while path in taken:
        number += 1
        path = folder / f"{digest}-{number}{SUFFIX}"
    return path


def try_folder(folder: Path) -> None:
    """Makes a folder, if there is none, and tries in it what a snapshot does.

    Raises:
        OSError: no snapshot can be written there.
    """
    # Of a file in its place, the attempt below says what is wrong.
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, exist_ok=True)
    descriptor, tried = _create(folder)
    os.close(descriptor)
    tried.unlink()
    sync_folder(folder)


def lock_folder(folder: Path) -> int:
    """Returns a descriptor of a folder; until it is closed, no other can be had.

    A file system without locks gives any number of them.

    Raises:
        BlockingIOError: a drafter has one.
        OSError: there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass
    return descriptor


def write_pool(folder: Path, texts: Sequence[PoolText], taken: Iterable[Path] = ()) -> Path:
    """Replaces the snapshot of one pool.

    Args:
        folder: of the snapshots.
        texts: of the pool, at least one, in the order of feeding.
        taken: see `path_of`.

    Raises:
        OSError: it could not be written; the old snapshot is unchanged.
    """
    header = _header_of(texts)
    path = path_of(folder, texts[0].pool_id, taken)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    descriptor, partial = _create(folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            parts: list[Any] = [_PREFIX.pack(MAGIC, VERSION, len(header)), header]
            # Not copied, which would hold the interpreter's lock.
            arrays = (np.ascontiguousarray(text.token_ids, dtype="<u4") for text in texts)
            for part in itertools.chain(parts, arrays):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        # What is half-written would take the room of the next try.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return path


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path, paths: Iterable[Path]) -> None:
    """Removes snapshots from a folder, which may be gone, and files left half-written."""
    for path in (*paths, *folder.glob(f"*{_PARTIAL_SUFFIX}")):
        path.unlink(missing_ok=True)


def snapshots_in(folder: Path) -> list[Path]:
    """Returns the snapshots in a folder; none if there is no such folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def read_pool(path: Path) -> list[PoolText]:
    """Returns the texts of one pool.

    Raises:
        DamagedSnapshotError: the file is damaged, or of another version.
    """
    try:
        content = _read(path)
    except OSError as error:
        raise DamagedSnapshotError(path, str(error)) from None
    if len(content) < _PREFIX.size + _DIGEST_BYTES:
        raise DamagedSnapshotError(path, f"it ends after {len(content)} bytes")
    magic, version, header_bytes = _PREFIX.unpack_from(content)
    if magic != MAGIC:
        raise DamagedSnapshotError(path, "it does not begin like a snapshot")
    if version != VERSION:
        raise DamagedSnapshotError(path, f"it has version {version}, and this reads {VERSION}")
    body = memoryview(content)[:-_DIGEST_BYTES]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != content[-_DIGEST_BYTES:]:
        raise DamagedSnapshotError(path, "its checksum is wrong")
    try:
        return _parse(body[_PREFIX.size :], header_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedSnapshotError(path, f"its header is wrong: {error}") from None


def _read(path: Path) -> bytes:
    """The bytes of a snapshot; waits for nothing, whatever has its name.

    Raises:
        DamagedSnapshotError: it is larger than any pool, or no file at all.
        OSError: it cannot be read.
    """
    # A pipe that nobody writes to would be waited for, and a device may have no end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedSnapshotError(path, "it is no regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise DamagedSnapshotError(path, "it is larger than any pool")
        return file.read(status.st_size)


def _create(folder: Path) -> tuple[int, Path]:
    """A file to be written, and its path, which nothing had before."""
    # It may contain prompts: only this user may read it.
    descriptor, path = tempfile.mkstemp(suffix=_PARTIAL_SUFFIX, dir=folder)
    return descriptor, Path(path)


def _header_of(texts: Sequence[PoolText]) -> bytes:
    pool_id, ngram_mask = texts[0].pool_id, texts[0].ngram_mask
    head = json.dumps({"pool_id": pool_id, "ngram_mask": ngram_mask})
    records = (
        json.dumps(
            [
                [len(text.token_ids), text.age_s, text.feed_key.hex()]
                for text in texts[first : first + _RECORDS_TOGETHER]
            ]
        )
        for first in range(0, len(texts), _RECORDS_TOGETHER)
    )
    joined = ", ".join(part[1:-1] for part in records)
    return f'{head[:-1]}, "texts": [{joined}]}}'.encode()


def _parse(body: memoryview, header_bytes: int) -> list[PoolText]:
    header = json.loads(bytes(body[:header_bytes]))
    token_ids = np.frombuffer(body[header_bytes:], dtype="<u4").astype(np.uint32, copy=False)
    pool_id, ngram_mask = str(header["pool_id"]), int(header["ngram_mask"])
    if not pool_id.encode() or not 0 < ngram_mask < 1 << 32:
        raise ValueError(f"pool {pool_id!r} with n-grams {ngram_mask:#x}")
    texts = []
    start = 0
    for num_tokens, age_s, feed_key in header["texts"]:
        end = start + int(num_tokens)
        if not (start < end <= len(token_ids) and math.isfinite(age_s) and age_s >= 0):
            raise ValueError(f"a text of {num_tokens} tokens, {age_s} s old")
        texts.append(
            PoolText(
                pool_id=pool_id,
                token_ids=token_ids[start:end],
                age_s=float(age_s),
                feed_key=bytes.fromhex(feed_key),
                ngram_mask=ngram_mask,
            )
        )
        start = end
    if start != len(token_ids):
        raise ValueError(f"{len(token_ids) - start} tokens are of no text")
    return texts
