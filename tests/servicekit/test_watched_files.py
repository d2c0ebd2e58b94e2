"""Files that are read again when they change."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from servicekit.channels import watched_files
from servicekit.channels.watched_files import WatchedFiles
from servicekit.config import ConfigError


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 0.0)


class Words:
    """Two files of one word each, and what was told of their changes."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "first", folder / "second"]
        self.write("a", "b")
        self.reports: list[str] = []
        self.num_reads = 0
        self.watched = WatchedFiles(
            self.paths,
            self.read,
            on_reload=lambda error: self.reports.append(str(error) if error else "read"),
        )

    def write(self, *words: str) -> None:
        for path, word in zip(self.paths, words, strict=True):
            path.write_text(word)

    def read(self) -> tuple[str, ...]:
        self.num_reads += 1
        words = tuple(path.read_text() for path in self.paths if path.exists())
        if len(words) < 2 or "bad" in words:
            raise ConfigError("--words", f"{words}")
        return words


def test_a_change_is_read_once(tmp_path: Path) -> None:
    words = Words(tmp_path)
    assert words.watched.value == ("a", "b")
    for _ in range(3):
        words.watched.refresh()
    assert words.num_reads == 1
    words.write("a", "longer")
    for _ in range(3):
        words.watched.refresh()
    assert words.watched.value == ("a", "longer")
    assert words.num_reads == 2
    assert words.reports == ["read"]


def test_a_change_while_files_are_read_is_read_next(tmp_path: Path) -> None:
    file = tmp_path / "word"
    next_of = {"a": "bb", "bb": "ccc"}

    def read() -> str:
        word = file.read_text()
        file.write_text(next_of.get(word, word))
        return word

    file.write_text("a")
    watched = WatchedFiles([file], read, on_reload=lambda error: None)
    values = [watched.value]
    for _ in range(2):
        watched.refresh()
        values.append(watched.value)
    assert values == ["a", "bb", "ccc"]


def test_a_replaced_file_and_a_moved_link_are_changes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "word").write_text(name)
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "one")
    watched = WatchedFiles(
        [link / "word"], lambda: (link / "word").read_text(), on_reload=lambda error: None
    )
    # As Kubernetes updates a mounted secret.
    (tmp_path / "new").symlink_to(tmp_path / "two")
    (tmp_path / "new").replace(link)
    watched.refresh()
    assert watched.value == "two"
    (tmp_path / "new").write_text("red")
    (tmp_path / "new").replace(tmp_path / "two" / "word")
    watched.refresh()
    assert watched.value == "red"


def test_what_cannot_be_read_keeps_the_last_value_and_is_told_once(tmp_path: Path) -> None:
    words = Words(tmp_path)
    words.write("a", "bad")
    for _ in range(3):
        words.watched.refresh()
    assert words.watched.value == ("a", "b")
    assert words.reports == ["--words: ('a', 'bad')"]
    words.paths[1].unlink()
    words.watched.refresh()
    assert words.watched.value == ("a", "b")
    assert len(words.reports) == 2
    words.write("c", "d")
    words.watched.refresh()
    assert words.watched.value == ("c", "d")
    assert words.reports[2:] == ["read"]


def test_what_goes_on_failing_is_read_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file takes a second of the interpreter."""
    now_s = 0.0
    monkeypatch.setattr(watched_files, "CHECK_INTERVAL_S", 1.0)
    monkeypatch.setattr(watched_files, "time", SimpleNamespace(monotonic=lambda: now_s))
    words = Words(tmp_path)
    words.write("a", "bad")

    def refresh(seconds: int) -> int:
        """How often the files are read in so many seconds."""
        nonlocal now_s
        before = words.num_reads
        for _ in range(seconds):
            now_s += 1.0
            words.watched.refresh()
        return words.num_reads - before

    assert refresh(8) == 4
    assert refresh(600) <= 15
    assert refresh(60) == 1
    words.write("a longer one", "bad")
    assert refresh(8) == 4, "a change is a new beginning"
    assert len(words.reports) == 2


def test_what_failed_is_read_again_even_if_it_looks_the_same(tmp_path: Path) -> None:
    words = Words(tmp_path)
    words.paths[1].write_text("bad")
    stamp = words.paths[1].stat()
    words.watched.refresh()
    # Completed within one tick of the file's clock, by as many bytes.
    words.paths[1].write_text("new")
    os.utime(words.paths[1], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    words.watched.refresh()
    assert words.watched.value == ("a", "new")
    num_reads = words.num_reads
    words.watched.refresh()
    assert words.num_reads == num_reads, "what was read is not read again"


def test_files_that_cannot_be_read_at_first_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--words"):
        WatchedFiles([], _fail, on_reload=lambda error: None)


def _fail() -> None:
    raise ConfigError("--words", "no")


def test_one_thread_reads_while_the_others_use_the_last_value(tmp_path: Path) -> None:
    words = Words(tmp_path)
    reading, may_end = threading.Event(), threading.Event()

    def read() -> tuple[str, ...]:
        reading.set()
        assert may_end.wait(20)
        return words.read()

    watched = WatchedFiles(words.paths, words.read, on_reload=lambda error: None)
    watched._read = read
    words.write("c", "d")
    slow = threading.Thread(target=watched.refresh)
    slow.start()
    assert reading.wait(20)
    watched.refresh()  # returns at once
    assert watched.value == ("a", "b")
    may_end.set()
    slow.join(20)
    assert watched.value == ("c", "d")
