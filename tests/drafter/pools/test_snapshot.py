"""Pools on disk: they are restored, and damaged files are skipped."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

import drafter.pools.snapshotter
from drafter.pool_index.records import PoolLimits, PoolText
from drafter.pools.snapshot import (
    MAGIC,
    SUFFIX,
    VERSION,
    DamagedSnapshotError,
    path_of,
    read_pool,
    snapshots_in,
    write_pool,
)
from drafter.pools.store import PoolStore
from servicekit.config import ConfigError
from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import drafter_pb2_grpc
from tests.drafter.pool_requests import NOTHING, draft_of, keep_in_pool
from tests.drafter.running_drafter import RunningDrafter, StartDrafter
from tests.module_process import module_process, read_line


def text(token_ids: list[int], *, pool_id: str = "p", age_s: float = 1.5) -> PoolText:
    return PoolText(
        pool_id=pool_id,
        token_ids=np.array(token_ids, dtype=np.uint32),
        age_s=age_s,
        ngram_mask=0b11110,
    )


def test_a_pool_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    texts = [text([1, 2**32 - 1, 0]), text([7, 8], age_s=0.0)]
    path = write_pool(tmp_path, texts)
    assert path == path_of(tmp_path, "p")
    assert path.stat().st_mode & 0o077 == 0, "other users may not read kept texts"
    back = read_pool(path)
    for read, written in zip(back, texts, strict=True):
        assert read.token_ids.tolist() == written.token_ids.tolist()
        assert read.token_ids.dtype == np.uint32
        for name in ("pool_id", "age_s", "ngram_mask"):
            assert getattr(read, name) == getattr(written, name)


def test_a_pool_s_id_may_hold_anything(tmp_path: Path) -> None:
    pool_ids = ["../../etc/passwd", "a/b", "ä\n", "x" * 256]
    for pool_id in pool_ids:
        write_pool(tmp_path, [text([1, 2], pool_id=pool_id)])
    assert {read_pool(path)[0].pool_id for path in snapshots_in(tmp_path)} == set(pool_ids)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def damaged_at(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_any_damaged_byte_and_any_truncation_is_detected(tmp_path: Path) -> None:
    path = write_pool(tmp_path, [text([1, 2, 3])])
    content = path.read_bytes()
    damages = [damaged_at(content, at) for at in range(len(content))]
    damages += [content[:end] for end in range(len(content))]
    damages += [content + b"\0"]
    for damage in damages:
        path.write_bytes(damage)
        with pytest.raises(DamagedSnapshotError) as error:
            read_pool(path)
        assert str(path) in str(error.value)
    path.write_bytes(content)
    assert len(read_pool(path)) == 1


def test_a_failing_write_leaves_the_former_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pool(tmp_path, [text([1, 2])])

    def no_space(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        write_pool(tmp_path, [text([3, 4])])
    assert read_pool(path)[0].token_ids.tolist() == [1, 2]
    assert names_in(tmp_path) == {path.name}, "the disk may be full: nothing half-written stays"


def test_a_pool_may_change_while_its_texts_are_copied() -> None:
    limits = PoolLimits(max_pool_bytes=1 << 16, max_pools_bytes=1 << 18, pool_ttl_s=10)
    now_s = 0.0
    store = PoolStore(limits, clock=lambda: now_s, seed=1)
    for i in range(5):
        store.feed("p", np.arange(i * 10, i * 10 + 5, dtype=np.uint32), ngram_mask=2)
        now_s += 1
    store.finish()
    copied = store.texts_of("p")
    assert next(copied).token_ids.tolist() == [0, 1, 2, 3, 4]
    now_s = 12.5  # three of five have expired
    store.finish()
    store.feed("p", np.arange(90, 95, dtype=np.uint32), ngram_mask=2)
    store.finish()
    assert [t.token_ids.tolist()[0] for t in copied] == [30, 40]
    now_s = 100.0
    unfinished = store.texts_of("p")
    store.finish()
    assert store.num_pools == 0
    assert list(unfinished) == []


async def test_a_drafter_restores_the_pools_of_the_one_before(
    start_drafter: StartDrafter, tmp_path: Path
) -> None:
    folder = tmp_path / "not" / "there yet"
    first = await start_drafter(snapshot_dir=folder)
    await keep_in_pool(first, [1, 2, 3, 4], pool_id="a", feed_id="x")
    first.clock.now_s += 1
    await keep_in_pool(first, [1, 2, 9], pool_id="b")
    first.clock.now_s += 1
    await keep_in_pool(first, [1, 2, 7], pool_id="a")
    await first.drafter.drain()
    assert first.sample("tandem_drafter_snapshots_total", outcome="written") == 1

    second = await start_drafter(snapshot_dir=folder)
    assert [entry["event"] for entry in second.log] == ["pools_restored"]
    assert await draft_of(second, [1, 2], pool_id="a") == ([3, 4], 2, pb.SOURCE_POOL)
    assert await draft_of(second, [1, 2], pool_id="a", tie=pb.TIE_LATEST) == (
        [7], 2, pb.SOURCE_POOL,
    )  # fmt: skip
    assert await draft_of(second, [1, 2], pool_id="b") == ([9], 2, pb.SOURCE_POOL)
    await keep_in_pool(second, [5, 5, 5], pool_id="a", feed_id="x")
    assert second.drafter.pools.num_texts == 3, "a feed id still feeds once"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: damaged_at(content, len(content) // 2),
        lambda content: b"something else entirely" * 10,
        lambda content: content[:8] + bytes([VERSION + 1]) + content[9:],
    ],
    ids=["empty", "cut off", "one bit", "another file", "a newer version"],
)
async def test_a_damaged_snapshot_is_skipped_and_named_in_the_log(
    start_drafter: StartDrafter, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = await start_drafter(snapshot_dir=tmp_path)
    await keep_in_pool(first, [1, 2, 3], pool_id="good")
    await keep_in_pool(first, [1, 2, 4], pool_id="bad")
    await first.drafter.drain()
    bad = path_of(tmp_path, "bad")
    bad.write_bytes(damage(bad.read_bytes()))
    second = await start_drafter(snapshot_dir=tmp_path)
    assert await draft_of(second, [1, 2], pool_id="good") == ([3], 2, pb.SOURCE_POOL)
    assert await draft_of(second, [1, 2], pool_id="bad") == NOTHING
    [skipped] = [entry for entry in second.log if entry["event"] == "snapshot_skipped"]
    assert skipped["path"] == str(bad)
    assert str(bad) in str(skipped["reason"])
    assert second.sample("tandem_drafter_internal_errors_total", reason="snapshot") == 1


def make_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 32)


NO_SNAPSHOTS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path),
    "link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "huge file": make_sparse_file,
}


@pytest.mark.parametrize("make", NO_SNAPSHOTS.values(), ids=NO_SNAPSHOTS)
async def test_what_is_no_file_is_skipped_and_stays(
    start_drafter: StartDrafter, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    first = await start_drafter(snapshot_dir=tmp_path)
    await keep_in_pool(first, [1, 2, 3], pool_id="good")
    await first.drafter.drain()
    odd = path_of(tmp_path, "odd")
    make(odd)
    before = odd.lstat()
    second = await start_drafter(snapshot_dir=tmp_path)
    assert await draft_of(second, [1, 2], pool_id="good") == ([3], 2, pb.SOURCE_POOL)
    [skipped] = [entry for entry in second.log if entry["event"] == "snapshot_skipped"]
    assert str(odd) in str(skipped["reason"])
    await keep_in_pool(second, [1, 2, 4], pool_id="odd")
    await second.drafter.drain()
    assert (odd.lstat().st_mode, odd.lstat().st_ino) == (before.st_mode, before.st_ino)
    third = await start_drafter(snapshot_dir=tmp_path)
    assert await draft_of(third, [1, 2], pool_id="odd") == ([4], 2, pb.SOURCE_POOL)


@pytest.mark.parametrize("is_newer", [True, False])
async def test_a_file_that_was_not_restored_stays_as_it_is(
    start_drafter: StartDrafter, tmp_path: Path, is_newer: bool
) -> None:
    """After a rollback the newer version may come back, and needs its files."""
    first = await start_drafter(snapshot_dir=tmp_path)
    await keep_in_pool(first, [1, 2, 3], pool_id="a")
    await keep_in_pool(first, [1, 2, 4], pool_id="b")
    await first.drafter.drain()
    written = {path: path.read_bytes() for path in snapshots_in(tmp_path)}
    for path, content in written.items():
        path.write_bytes(
            content[:8] + bytes([VERSION + 1]) + content[9:] if is_newer else content[:-1]
        )
    skipped = {path: path.read_bytes() for path in written}

    second = await start_drafter(snapshot_dir=tmp_path)
    await keep_in_pool(second, [1, 2, 5], pool_id="a")
    assert second.drafter.snapshotter is not None
    await second.drafter.snapshotter.write()
    await keep_in_pool(second, [1, 2, 6], pool_id="a")
    await second.drafter.drain()
    assert {path: path.read_bytes() for path in skipped} == skipped
    assert len(snapshots_in(tmp_path)) == 3

    for path, content in written.items():
        path.write_bytes(content)
    third = await start_drafter(snapshot_dir=tmp_path)
    assert third.drafter.pools.num_texts == 4, "both files of a pool are restored"
    await third.drafter.drain()
    assert len(snapshots_in(tmp_path)) == 2, "and are one again"


@pytest.mark.parametrize(
    "header",
    [
        b'{"pool_id": "p", "ngram_mask": 2, "texts": [[1e999, 1]]}',
        b'{"pool_id": "p", "ngram_mask": 2, "texts": [[1, 1' + b"0" * 400 + b"]]}",
        b"[" * 100_000,
        b'{"pool_id": "\\ud800", "ngram_mask": 2, "texts": []}',
    ],
    ids=["infinity", "a huge number", "deep", "half a character"],
)
async def test_a_file_with_a_right_checksum_and_a_wrong_header_fails_alone(
    start_drafter: StartDrafter, tmp_path: Path, header: bytes
) -> None:
    write_pool(tmp_path, [text([1, 2, 3], pool_id="good")])
    body = MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    bad = tmp_path / f"bad{SUFFIX}"
    bad.write_bytes(body + hashlib.blake2b(body, digest_size=32).digest())
    running = await start_drafter(snapshot_dir=tmp_path)
    assert await draft_of(running, [1, 2], pool_id="good") == ([3], 2, pb.SOURCE_POOL)
    await running.drafter.drain()
    assert running.sample("tandem_drafter_snapshots_total", outcome="written") == 1


async def test_a_pool_that_cannot_be_written_fails_alone(
    start_drafter: StartDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter(snapshot_dir=tmp_path)

    def write(folder: Path, texts: list[PoolText], taken: set[Path]) -> Path:
        if texts[0].pool_id == "bad":
            raise ValueError("an error that no disk reports")
        return write_pool(folder, texts, taken)

    monkeypatch.setattr(drafter.pools.snapshotter, "write_pool", write)
    for pool_id in ("bad", "good"):
        await keep_in_pool(running, [1, 2, 3], pool_id=pool_id)
    snapshotter = running.drafter.snapshotter
    assert snapshotter is not None
    await snapshotter.write()
    assert snapshots_in(tmp_path) == [path_of(tmp_path, "good")]
    [failed] = [entry for entry in running.log if entry["event"] == "snapshot_failed"]
    assert (failed["reason"], failed["num_failed"]) == ("an error that no disk reports", 1)
    assert running.sample("tandem_drafter_snapshots_total", outcome="failed") == 1
    monkeypatch.undo()
    await snapshotter.write()
    assert len(snapshots_in(tmp_path)) == 2


async def with_an_old_and_a_new_pool(start_drafter: StartDrafter, folder: Path) -> RunningDrafter:
    """A drafter whose pools "old" and "new" are written; the first expires in 4 s."""
    running = await start_drafter(snapshot_dir=folder, pool_ttl_s=10)
    await keep_in_pool(running, [1, 2, 3], pool_id="old")
    running.clock.now_s += 6
    await keep_in_pool(running, [1, 2, 3], pool_id="new")
    assert running.drafter.snapshotter is not None
    await running.drafter.snapshotter.write()
    assert len(snapshots_in(folder)) == 2
    return running


async def test_the_file_of_an_expired_pool_is_removed(
    start_drafter: StartDrafter, tmp_path: Path
) -> None:
    running = await with_an_old_and_a_new_pool(start_drafter, tmp_path)
    (tmp_path / "half-written.partial").write_bytes(b"x")
    (tmp_path / "README").write_bytes(b"a file of another program")
    running.clock.now_s += 6
    await running.drafter.pool_keeper.settle()
    assert running.drafter.snapshotter is not None
    await running.drafter.snapshotter.write()
    assert names_in(tmp_path) == {path_of(tmp_path, "new").name, "README"}


# The last one no user may write to, the superuser included.
@pytest.mark.parametrize("place", ["file", "file/pools", "/proc/self"])
async def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(
    start_drafter: StartDrafter, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(ConfigError) as refused:
        await start_drafter(snapshot_dir=tmp_path / place)
    assert refused.value.key == "--snapshot-dir"
    assert str(tmp_path / place) in refused.value.message
    assert (tmp_path / "file").read_bytes() == b"kept"


async def test_a_folder_that_another_drafter_uses_is_refused_at_the_start(
    start_drafter: StartDrafter, tmp_path: Path
) -> None:
    """Each would write its pools over those of the other, whose text would be lost."""
    first = await start_drafter(snapshot_dir=tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            await start_drafter(snapshot_dir=tmp_path)
        assert refused.value.key == "--snapshot-dir"
        assert refused.value.message == f"{tmp_path}: another drafter uses it"
    await keep_in_pool(first, [1, 2, 3], pool_id="a")
    await first.drafter.drain()
    second = await start_drafter(snapshot_dir=tmp_path)
    assert await draft_of(second, [1, 2], pool_id="a") == ([3], 2, pb.SOURCE_POOL)


async def test_snapshots_are_taken_on_schedule(
    start_drafter: StartDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_drafter(snapshot_dir=tmp_path, snapshot_interval_s=0.01)
    has_written = asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(folder: Path, texts: list[PoolText], taken: set[Path]) -> Path:
        loop.call_soon_threadsafe(has_written.set)
        return write_pool(folder, texts, taken)

    monkeypatch.setattr(drafter.pools.snapshotter, "write_pool", write)
    upkeep = asyncio.create_task(running.drafter.run_forever())
    try:
        for _ in range(2):
            has_written.clear()
            await keep_in_pool(running, [1, 2, 3])
            await asyncio.wait_for(has_written.wait(), 10)
    finally:
        upkeep.cancel()


async def test_sigterm_writes_the_pools_and_the_next_process_has_them(tmp_path: Path) -> None:
    flags = ("--listen", "127.0.0.1:0", "--metrics-listen", "", "--snapshot-dir", str(tmp_path))
    in_pool = pb.NgramParams(pool_id="p")

    async def propose(address: str, sequence_id: str, token_ids: list[int]) -> list[int]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            created = pb.SequenceDelta(
                sequence_id=sequence_id, token_ids=token_ids, max_draft_tokens=4, params=in_pool
            )
            response = await stub.Propose(pb.ProposeRequest(sequences=[created]))
            release = pb.Release(sequence_id=sequence_id, keep=pb.KEEP_ALL, feed_id=sequence_id)
            await stub.Release(pb.ReleaseRequest(releases=[release]))
            return list(response.proposals[0].token_ids)

    for sequence_id, expected in (("a", []), ("b", [3, 4])):
        async with module_process("drafter", *flags) as process:
            address = (await read_line(process)).strip().removeprefix("ready grpc=")
            text = [1, 2, 3, 4] if sequence_id == "a" else [1, 2]
            assert await propose(address, sequence_id, text) == expected
            # At once: texts that wait to be indexed are written too.
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 20) == 0
    assert len(snapshots_in(tmp_path)) == 1
