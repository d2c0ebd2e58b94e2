"""Grammars are tried in processes of their own: bounded, replaced, and gone with their verifier."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from verifier.errors import InvalidRequestError, OverloadedError
from verifier.structured import grammars as module
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind
from verifier.structured.trials import Bounds, Trier

TOKENIZER = Path(__file__).parents[3] / "examples" / "demo_model" / "model" / "tokenizer.json"
VOCABULARY = 2048
PATIENCE_S = 60
# What stands in for the library, by the text of a regex: it takes processor time, memory or time.
_STAND_IN = """
import os, time
from verifier.structured import trial_process as trials
tried = trials._try
def stand_in(tokenizer, tags, request):
    text = request["text"]
    while text == "spin":
        pass
    held = []
    while text == "hoard":
        held.append(bytearray(1 << 20))
    if text == "sleep":
        time.sleep(600)
    if text.startswith("until "):
        open(text.split()[1], "w").close()
        while not os.path.exists(text.split()[2]):
            time.sleep(0.01)
        request = {**request, "text": "a"}
    return tried(tokenizer, tags, request)
trials._try = stand_in
trials.main()
"""
_COMMAND = (sys.executable, "-c", _STAND_IN)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, "field")


@contextlib.contextmanager
def opened(
    monkeypatch: pytest.MonkeyPatch, bounds: Bounds, command: Sequence[str] = _COMMAND
) -> Iterator[Grammars]:
    monkeypatch.setattr(module, "Trier", functools.partial(Trier, command=command))
    grammars = Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[0], bounds=bounds)
    try:
        yield grammars
    finally:
        grammars.close()


def refusal(grammars: Grammars, text: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        grammars.compile(regex(text)).result(timeout=PATIENCE_S)
    assert caught.value.field == "field"
    return caught.value.message


def processes_of(parent: int) -> list[int]:
    """The processes that it has started and that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, of = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(of) == parent and state not in "ZX":
                found.append(int(folder.name))
    return found


def wait_until_gone(pids: Sequence[int]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and not _is_dead(pid):
            assert time.monotonic() < deadline_s, f"process {pid} still runs"
            time.sleep(0.01)


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("text", "bounds", "reason"),
    [
        ("spin", Bounds(cpu_s=0.1, elapsed_s=PATIENCE_S), "takes over 0.1 s"),
        ("hoard", Bounds(memory_bytes=64 << 20, elapsed_s=PATIENCE_S), "over 64 MiB of memory"),
        ("sleep", Bounds(elapsed_s=0.2), "takes over 0.2 s"),
    ],
)
def test_a_grammar_over_a_bound_is_refused_by_name_and_costs_no_other_one(
    monkeypatch: pytest.MonkeyPatch, text: str, bounds: Bounds, reason: str
) -> None:
    with opened(monkeypatch, bounds) as grammars:
        # Whatever a process needs to start is no part of the grammar's time.
        for each in grammars._triers:
            each.start()
        assert reason in refusal(grammars, text)
        for state in [grammars.compile(regex(each)) for each in "abc"]:
            assert state.result(timeout=PATIENCE_S).error is None
        assert reason in refusal(grammars, text)


def test_what_was_refused_or_compiled_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, Bounds(cpu_s=0.1)) as grammars:
        refusal(grammars, "spin")
        grammars.compile(regex("a")).result(timeout=PATIENCE_S)

        def try_out(*_: object) -> None:
            raise AssertionError

        monkeypatch.setattr(Trier, "try_out", try_out)
        assert "takes over" in refusal(grammars, "spin")
        grammars.compile(regex("a")).result(timeout=PATIENCE_S)


def test_another_grammar_compiles_while_one_takes_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began, end = tmp_path / "began", tmp_path / "end"
    with opened(monkeypatch, Bounds(cpu_s=PATIENCE_S, elapsed_s=PATIENCE_S)) as grammars:
        long = grammars.compile(regex(f"until {began} {end}"))
        while not began.exists():
            time.sleep(0.001)
        # Equal ones wait for the verdict, and take no other process.
        equal = grammars.compile(regex(f"until {began} {end}"))
        for text in "abc":
            grammars.compile(regex(text)).result(timeout=PATIENCE_S)
        assert not long.done()
        assert not equal.done()
        end.touch()
        for each in (long, equal):
            each.result(timeout=PATIENCE_S)


def test_a_process_that_was_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, Bounds()) as grammars:
        grammars.compile(regex("a")).result(timeout=PATIENCE_S)
        for pid in processes_of(os.getpid()):
            if b"trial_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                wait_until_gone([pid])
        grammars.compile(regex("b")).result(timeout=PATIENCE_S)


def test_a_process_that_cannot_start_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(monkeypatch, Bounds(), ["/nonexistent"]) as grammars:
        with pytest.raises(OverloadedError, match="no process is left") as caught:
            grammars.compile(regex("a")).result(timeout=PATIENCE_S)
        assert caught.value.retry_after_ms


@pytest.mark.parametrize("text", ["spin", "sleep", "a"])
def test_nothing_runs_after_a_verifier_was_killed(text: str) -> None:
    script = f"""
import functools, sys, time
from pathlib import Path
from verifier.structured import grammars as module
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind
from verifier.structured.trials import Bounds, Trier
module.Trier = functools.partial(Trier, command={_COMMAND!r})
grammars = Grammars(Path({str(TOKENIZER)!r}), vocab_size={VOCABULARY}, end_token_ids=[0],
                    bounds=Bounds(cpu_s=600, elapsed_s=600))
grammars.compile(Grammar(GrammarKind.REGEX, "a")).result(60)
grammars.compile(Grammar(GrammarKind.REGEX, {text!r}))
print("begun", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as verifier:
        assert verifier.stdout is not None
        assert verifier.stdout.readline() == "begun\n"
        started = processes_of(verifier.pid)
        assert started
        verifier.kill()
    wait_until_gone(started)
