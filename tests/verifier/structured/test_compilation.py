"""Which grammars are compiled, when, for whom, and how many wait."""

import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.verifier.structured.compiled import END, TOKENIZER, VOCABULARY, state_of
from verifier.errors import InvalidRequestError, OverloadedError
from verifier.structured import grammars as module
from verifier.structured import waiting_jobs
from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind


@contextlib.contextmanager
def held_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Grammars, threading.Event]]:
    """Its thread compiles the regex "held" until the event, or the end."""
    began, end = threading.Event(), threading.Event()
    compile_as_before = Grammars._compile

    def compile_held(self: Grammars, tokenizer: Any, job: Any) -> GrammarState:
        if job.grammar.text == "held":
            began.set()
            assert end.wait(60)
        return compile_as_before(self, tokenizer, job)

    monkeypatch.setattr(Grammars, "_compile", compile_held)
    grammars = Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END])
    held = grammars.compile(Grammar(GrammarKind.REGEX, "held", "held field"))
    try:
        assert began.wait(60)
        yield grammars, end
    finally:
        end.set()
        with contextlib.suppress(InvalidRequestError):
            held.result(timeout=60)
        grammars.close()
        grammars._thread.join(60)


def test_only_so_many_grammars_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_jobs, "MAX_WAITING", 2)
    with held_thread(monkeypatch) as (grammars, end):
        waiting = [grammars.compile(Grammar(GrammarKind.REGEX, "a")) for _ in range(2)]
        with pytest.raises(OverloadedError) as caught:
            grammars.compile(Grammar(GrammarKind.REGEX, "a"))
        assert caught.value.retry_after_ms
        # One that is cancelled leaves its place.
        waiting[0].cancel()
        last = grammars.compile(Grammar(GrammarKind.REGEX, "b"))
        assert not last.done()
        end.set()
        last.result(timeout=60)
        waiting[1].result(timeout=60)


def test_no_more_is_compiled_than_may_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for room is not late, however long that takes."""
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.2)
    grammars = Grammars(TOKENIZER, vocab_size=VOCABULARY, end_token_ids=[END], max_num_states=2)
    states = [state_of(grammars, GrammarKind.REGEX, "a") for _ in range(2)]
    waiting = [grammars.compile(Grammar(GrammarKind.REGEX, "b"), tenant=t) for t in "xy"]
    # One more that could be compiled would be there by now.
    time.sleep(0.5)
    assert not any(each.running() or each.done() for each in waiting)
    states.pop()
    states.append(waiting.pop(0).result(timeout=60))
    time.sleep(0.2)
    assert not waiting[0].running()
    gc.disable()
    try:
        del states[0]
        states.append(waiting.pop(0).result(timeout=60))
        states.clear()
        while grammars._priorities:
            time.sleep(0.001)
    finally:
        gc.enable()
    grammars.close()


def test_tenants_take_turns_and_higher_priorities_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_thread(monkeypatch) as (grammars, end):
        done: list[str] = []

        def compile_for(tenant: str, name: str, priority: int = 0) -> "Future[GrammarState]":
            future = grammars.compile(
                Grammar(GrammarKind.REGEX, "a"), tenant=tenant, priority=priority
            )
            future.add_done_callback(lambda _: done.append(name))
            return future

        futures = [compile_for("a", f"a{n}") for n in range(4)]
        futures += [compile_for("b", "b0"), compile_for("b", "b1"), compile_for("c", "c0")]
        futures += [compile_for("c", "urgent", 1), compile_for("d", "low", -1)]
        end.set()
        for each in futures:
            each.result(timeout=60)
    # "c" had its turn with what is urgent.
    assert done == ["urgent", "a0", "b0", "c0", "a1", "b1", "a2", "a3", "low"]


def test_a_grammar_that_waits_for_others_for_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.1)
    with held_thread(monkeypatch) as (grammars, end):
        late = [grammars.compile(Grammar(GrammarKind.REGEX, "a", "late")) for _ in range(3)]
        time.sleep(0.2)
        end.set()
        for each in late:
            with pytest.raises(OverloadedError, match="grammars that came before") as caught:
                each.result(timeout=60)
            assert caught.value.field == "late"
            assert caught.value.retry_after_ms
        grammars.compile(Grammar(GrammarKind.REGEX, "a")).result(timeout=60)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_grammar_that_compiles_while_the_interpreter_ends_crashes_nothing(
    is_closed: bool,
) -> None:
    script = f"""
import json, time
from pathlib import Path
from verifier.structured import grammars as module
from verifier.structured.grammar import Grammar
from verifier.structured.grammars import Grammars
from verifier.structured.library_grammar import GrammarKind
# After which the end comes and crashes: on a busy machine, the compilation may take as long.
module._LAST_COMPILE_S = 50.0
class SlowEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)
slow_end = SlowEnd()
grammars = Grammars(Path({str(TOKENIZER)!r}), vocab_size={VOCABULARY}, end_token_ids=[{END}])
# A part of a second, most of it in the library.
text = json.dumps([f"{{i:015}}" for i in range(20_000)])
compiling = grammars.compile(Grammar(GrammarKind.CHOICES, text))
while not compiling.running():
    time.sleep(0.001)
time.sleep(0.05)
assert not compiling.done()
if {is_closed}:
    grammars.close()
    assert compiling.done()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
