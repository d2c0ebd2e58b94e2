"""Compiles grammars, in one thread of its own, so that a slow one delays other grammars only.

A grammar is the client's. `_LIMITS` bounds its size, and the items and states of each step. They
bound compiling badly: a grammar of a few bytes may compile for very long, and take some 50 MB more
each second, which nothing can cancel. After `MAX_COMPILE_S` its sequences are rejected, and so is
every other grammar until the thread has left it. A row of a step may take up to some 60 ms, with
long literals after drafts. So an operator says whether clients may send grammars at all.

A compiled grammar may hold 60 MB. So only some are compiled before their sequences run; further
ones wait as texts until a sequence with a grammar ends. Tenants take turns at the thread. Those of
a low priority may wait for long to run, and take no place of those that run before them.

Each sequence gets matchers of its own, because copies of one share what they count, and its errors.
"""

import atexit
import contextlib
import enum
import functools
import json
import math
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from servicekit.errors import RequestError
from servicekit.shares import leaves_room
from verifier.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from verifier.structured.grammar_state import GrammarState, wrong_grammar
from verifier.structured.library_tokenizer import library_tokenizer

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Between the parts of a JSON value: a space or none. Where any white space is allowed, some models
# never end. A schema may say otherwise under "x-guidance".
_JSON: Any = {"whitespace_pattern": " ?"}
_MAX_WAITING = 1024
# How long the thread may be at work on others' grammars before one that waits is rejected.
_MAX_WAIT_S = 30.0
# Schemas of 20,000 strings take 0.1 s.
MAX_COMPILE_S = 10.0
_RETRY_MS = 1000
# How long the end waits for a grammar that compiles.
_LAST_COMPILE_S = 5.0
# A text in Lark as its lexer reads it: what may hold any character, repetitions ("a"~3), and the
# two operators whose automata double with each step of a regex. What is not closed is no Lark; it
# is taken as a whole, or a search for its end would begin at each of its characters.
_LARK_TOKEN = re.compile(
    r"""
    "(?:\\.|[^"\\])*(?:"|\\?\Z) | /(?:\\.|[^/\\])+(?:/|\\?\Z) | (?://|\#)[^\n]*
    | (?P<tag><[^<>\s]+>)
    | ~[ \t]*[0-9] | (?P<refused>[&~])
    """,
    re.VERBOSE | re.DOTALL,
)
# The library descends a frame for each rule that leads to another one, and a grammar within the
# limits of the wire may be a chain of thousands. Memory is used as far as the stack grows.
_STACK_BYTES = 512 << 20
# What texts that must come may begin with: how many answers are kept, and of how long a text. Most
# texts are short and come again.
_MAX_BEGINNINGS = 4096
_MAX_TEXT_BYTES = 64


class GrammarKind(enum.Enum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    LARK = "lark"


class ReasoningTags(NamedTuple):
    """Around the reasoning that may come before a grammar's text.

    Attributes:
        begin: "": the prompt has begun it; else the output may have none.
    """

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as the client wrote it.

    Attributes:
        text: of choices, the strings as a JSON list.
        field: of the request, for errors.
        reasoning: may come first; None: nothing may.
    """

    kind: GrammarKind
    text: str
    field: str = ""
    reasoning: ReasoningTags | None = None


class Grammars:
    """Compiles grammars in a thread of its own. For any thread."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        max_num_states: int = _MAX_WAITING,
        on_compiled: Callable[[GrammarKind, bool, float], None] | None = None,
    ) -> None:
        """Starts the thread, which reads the tokenizer.

        Args:
            tokenizer: the model's tokenizer.json.
            vocab_size: of the model's logits.
            end_token_ids: what may follow when a grammar's text is complete.
            max_num_states: how many states may be in use. While so many are, nothing is compiled.
                Three quarters are more than can run, so that it never keeps a sequence from
                running; the others are for priorities above the lowest that is in use.
            on_compiled: called in that thread for each grammar: its kind, whether it can be used,
                and how long compiling it took, in seconds.
        """
        self._on_compiled = on_compiled
        self._vocab_size = vocab_size
        self._max_num_states = max_num_states
        # Guards what follows, and tells the thread of a job, of room for a state or of the end.
        self._changed = threading.Condition()
        # One that is cancelled leaves at once, with its tokens.
        self._jobs = _WaitingJobs()
        # The priorities of the states that something still refers to. A collection of garbage may
        # free one wherever it begins, so what changes or reads this is one step of the interpreter.
        self._priorities: list[int] = []
        # Since when the thread has not waited for a job or for room.
        self._busy_since_s = time.monotonic()
        self._is_closed = False
        # What compiles for too long, for as long as it does.
        self._endless: Grammar | None = None
        # A daemon: the process's end does not wait for ever for a grammar that compiles.
        self._thread = threading.Thread(
            target=self._run,
            args=(tokenizer, end_token_ids),
            name="grammar",
            daemon=True,
        )
        # A thread gets the stack size of the moment in which it starts.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)
        atexit.register(self.close)

    def compile(
        self,
        grammar: Grammar,
        output_token_ids: Sequence[int] = (),
        *,
        is_drafted: bool = True,
        tenant: str = "",
        priority: int = 0,
    ) -> "Future[GrammarState]":
        """A sequence's own state, after the output that it has.

        The future's exception is a RequestError if the grammar is wrong or too complex, the output
        does not follow it, it waited too long for others, or the model's tokenizer cannot be used.

        Args:
            is_drafted: whether drafts are verified; without them, it takes half as long.
            tenant: with whom tenants of the same priority take turns.
            priority: the sequence's; higher first, as sequences run.

        Raises:
            InvalidRequestError: this grammar compiles for too long.
            OverloadedError: another one does, or too many wait to be compiled.
        """
        job = _Job(grammar, output_token_ids, is_drafted, tenant, priority)
        with self._changed:
            # Once: the thread that compiles may be done with it at any time.
            if (endless := self._endless) is not None:
                raise _too_long(grammar, endless)
            if not self._jobs.has_room(tenant):
                raise OverloadedError(
                    f"{len(self._jobs)} grammars wait to be compiled",
                    field=grammar.field,
                    retry_after_ms=_RETRY_MS,
                )
            self._jobs.add(job)
            self._changed.notify()
        job.future.add_done_callback(self._on_done)
        return job.future

    def close(self) -> None:
        """Ends the thread, after the grammar that it compiles; cancels those that wait.

        Blocks for that grammar, up to `_LAST_COMPILE_S`. Idempotent; the process's end calls it.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        for job in self._take_jobs():
            job.future.cancel()
        # The process would crash if the library returned while the interpreter ends.
        self._thread.join(_LAST_COMPILE_S)
        atexit.unregister(self.close)

    def _run(self, path: Path, end_token_ids: Sequence[int]) -> None:
        tokenizer = _read_tokenizer(path, self._vocab_size, end_token_ids)
        while (job := self._next_job()) is not None:
            self._work(tokenizer, job)
            # While the thread waits, it keeps no state alive.
            del job

    def _work(self, tokenizer: "_Tokenizer | None", job: "_Job") -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        timer = threading.Timer(MAX_COMPILE_S, self._give_up, [job])
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the system has no thread left
            job.future.set_exception(_no_thread(job.grammar))
            return
        # The future has an exception already if it took too long.
        with contextlib.suppress(InvalidStateError):
            try:
                state = self._compile_observed(tokenizer, job)
                job.future.set_result(self._counted(state, job.priority))
            except RequestError as error:
                # Its traceback leads to the matchers, and back to the future.
                job.future.set_exception(error.with_traceback(None))
            except BaseException as error:  # also what the library panics with
                job.future.set_exception(error)
        timer.cancel()
        # It may be at work just now.
        timer.join()
        self._endless = None

    def _next_job(self) -> "_Job | None":
        """Waits for one, and for room for its state; rejects those that waited too long. None once
        it is closed.
        """
        while True:
            with self._changed:
                while not (self._is_closed or (self._jobs and self._has_room())):
                    self._changed.wait()
                    self._busy_since_s = time.monotonic()
                if self._is_closed:
                    return None
                # Before that, they waited for room, as sequences wait to run.
                long_ago_s = time.monotonic() - _MAX_WAIT_S
                is_late = self._busy_since_s < long_ago_s
                late = self._jobs.take_older(long_ago_s) if is_late else []
                job = self._jobs.take_next() if self._jobs else None
            for each in late:
                with contextlib.suppress(InvalidStateError):
                    each.future.set_exception(_too_late(each.grammar))
            if job is not None:
                return job

    def _has_room(self) -> bool:
        """Whether the next job's state may be in use, too."""
        num_free = self._max_num_states - len(self._priorities)
        if num_free > self._max_num_states // 4:
            return True
        lowest = min(self._priorities, default=-math.inf)
        return num_free > 0 and self._jobs.highest_priority > lowest

    def _counted(self, state: GrammarState, priority: int) -> GrammarState:
        """Counts the state until nothing refers to it: whoever drops it need not say so."""
        with self._changed:
            self._priorities.append(priority)
        weakref.finalize(state, self._on_freed, priority).atexit = False
        return state

    def _on_freed(self, priority: int) -> None:
        """Called by any thread, wherever it drops the last reference: also below the lock."""
        with self._changed:
            self._priorities.remove(priority)
            self._changed.notify()

    def _give_up(self, job: "_Job") -> None:
        """Rejects what compiles for too long, and what waits behind it."""
        with self._changed:
            self._endless = job.grammar
        for each in (job, *self._take_jobs()):
            with contextlib.suppress(InvalidStateError):
                each.future.set_exception(_too_long(each.grammar, job.grammar))

    def _take_jobs(self) -> list["_Job"]:
        """Removes and returns the jobs that wait."""
        with self._changed:
            return self._jobs.take_older(math.inf)

    def _on_done(self, future: "Future[GrammarState]") -> None:
        with self._changed:
            self._jobs.discard(future)

    def _compile_observed(self, tokenizer: "_Tokenizer | None", job: "_Job") -> GrammarState:
        start_s = time.perf_counter()
        can_be_used = False
        try:
            state = self._compile(tokenizer, job)
            can_be_used = True
            return state
        finally:
            if self._on_compiled is not None:
                self._on_compiled(job.grammar.kind, can_be_used, time.perf_counter() - start_s)

    def _compile(self, tokenizer: "_Tokenizer | None", job: "_Job") -> GrammarState:
        grammar = job.grammar
        if tokenizer is None:
            raise UnsupportedFieldError(
                "the model's tokenizer cannot be used for grammars", field=grammar.field
            )
        try:
            text = _written(grammar, tokenizer.tags)
            if grammar.reasoning is not None:
                text = _behind_reasoning(text, grammar.reasoning, tokenizer.tags)
        except ValueError as error:
            raise wrong_grammar(str(error), grammar.field) from None
        matcher = tokenizer.matcher(text)
        if matcher.is_error():
            raise wrong_grammar(matcher.get_error(), grammar.field)
        state = GrammarState(
            matcher,
            tokenizer.matcher(text) if job.is_drafted else None,
            may_begin=tokenizer.may_begin,
            vocab_size=self._vocab_size,
            end_token_ids=tokenizer.end_token_ids,
            field=grammar.field,
        )
        state.take_in(job.output_token_ids, 0)
        # The first mask takes the longest; one that is too complex is refused here.
        try:
            state.allowed(())
        except Exception:
            state.forget_fault()
            raise
        return state


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A grammar to compile for a sequence with this output."""

    grammar: Grammar
    output_token_ids: Sequence[int]
    is_drafted: bool
    tenant: str
    priority: int
    future: "Future[GrammarState]" = field(default_factory=Future)
    arrived_at_s: float = field(default_factory=time.monotonic)


class _WaitingJobs:
    """The jobs that wait. The highest priority is next; of it, the tenant whose last turn is
    longest ago, whatever others wait with; of this tenant, the oldest job.
    """

    def __init__(self) -> None:
        # Oldest first.
        self._jobs: OrderedDict[Future[GrammarState], _Job] = OrderedDict()
        # The last turns of tenants, oldest first. Whoever is not among them had none of late.
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def highest_priority(self) -> int:
        """That of the next job; there must be one."""
        return max(job.priority for job in self._jobs.values())

    def has_room(self, tenant: str) -> bool:
        """Whether one more may wait. A tenant that has a name leaves room to others."""
        num_free = _MAX_WAITING - len(self)
        held = sum(job.tenant == tenant for job in self._jobs.values()) if tenant else 0
        return num_free > 0 and leaves_room(held=held, added=1, num_free=num_free)

    def add(self, job: _Job) -> None:
        self._jobs[job.future] = job

    def discard(self, future: "Future[GrammarState]") -> None:
        self._jobs.pop(future, None)

    def take_next(self) -> _Job:
        """Removes and returns it; there must be one."""
        job = min(
            self._jobs.values(), key=lambda each: (-each.priority, self._turns.get(each.tenant, 0))
        )
        del self._jobs[job.future]
        self._num_turns += 1
        self._turns[job.tenant] = self._num_turns
        self._turns.move_to_end(job.tenant)
        if len(self._turns) > _MAX_WAITING:
            self._turns.popitem(last=False)
        return job

    def take_older(self, arrived_at_s: float) -> list[_Job]:
        """Removes and returns the jobs that arrived before that."""
        taken = []
        while self._jobs and next(iter(self._jobs.values())).arrived_at_s < arrived_at_s:
            taken.append(self._jobs.popitem(last=False)[1])
        return taken


class _Tokenizer:
    """The library's, which can be used.

    Attributes:
        tags: as in `LibraryTokenizer`.
        end_token_ids: what may follow when a grammar's text is complete.
    """

    def __init__(
        self, tokenizer: LLTokenizer, tags: Mapping[str, int], end_token_ids: frozenset[int]
    ) -> None:
        self.tags = tags
        self.end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._begins = functools.lru_cache(_MAX_BEGINNINGS)(self._compute_begins)

    def matcher(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)

    def may_begin(self, text: bytes, token_id: int) -> bool:
        """See `GrammarState`. For any thread.

        True: the tokenizer begins the text with the token, and writes the rest, taken alone, as in
        the whole text; or the token is longer than the text, and the library forces no token of a
        text where an allowed one goes on after it.
        """
        return len(text) <= _MAX_TEXT_BYTES and self._begins(text, token_id)

    def _compute_begins(self, text: bytes, token_id: int) -> bool:
        token = self._tokenizer.decode_bytes([token_id])
        if len(token) > len(text):
            return _is_text(text)
        rest = text[len(token) :]
        if not (_is_text(text) and _is_text(rest)):
            # A part of a character, or a special token: matchers write such a text otherwise.
            return False
        token_ids: list[int] = self._tokenizer.tokenize_bytes(text)
        return token_ids == [token_id, *self._tokenizer.tokenize_bytes(rest)]


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read_tokenizer(path: Path, vocab_size: int, end_token_ids: Sequence[int]) -> _Tokenizer | None:
    """None if the library cannot use it."""
    # A model may name end tokens that have no logit.
    end_token_ids = [each for each in end_token_ids if each < vocab_size]
    try:
        text, tags = library_tokenizer(path.read_text(encoding="utf-8"))
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end_token_ids)
        return _Tokenizer(tokenizer, tags, frozenset(end_token_ids))
    except BaseException:  # also what the library panics with
        return None


def _written(grammar: Grammar, tags: Mapping[str, int]) -> str:
    """The grammar in the library's own form; `tags`: as in `LibraryTokenizer`."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        # The library takes no boolean for a schema.
        text = {"true": "{}", "false": '{"not": {}}'}.get(grammar.text.strip(), grammar.text)
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.CHOICES:
        choices = " | ".join(json.dumps(each) for each in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")

    def written(found: re.Match[str]) -> str:
        if operator := found["refused"]:
            raise ValueError(f"the operator {operator} is not supported outside of regexes")
        token_id = tags.get(found["tag"])
        return found[0] if token_id is None else f"<[{token_id}]>"

    return LLMatcher.grammar_from_lark(_LARK_TOKEN.sub(written, grammar.text))


def _behind_reasoning(text: str, reasoning: ReasoningTags, tags: Mapping[str, int]) -> str:
    """The grammar of an output that may reason before it follows another one.

    Args:
        text: of that one, in the library's own form: a grammar in Lark, or JSON.
        tags: as in `LibraryTokenizer`.
    """
    parts: list[dict[str, Any]] = [{"lark_grammar": text}]
    if text.lstrip().startswith("{"):
        parts = json.loads(text)["grammars"]
    parts[0]["name"] = "answer"
    begin, end = (f"<[{tags[tag]}]>" if tag in tags else json.dumps(tag) for tag in reasoning)
    if reasoning.end in tags:
        # Where the end is a token, its text must not come otherwise: who reads the output would
        # take it for the end.
        written = f"(TEXT {json.dumps(reasoning.end)} TEXT)"
        rules = f"thought: THOUGHT {end}\nTHOUGHT: TEXT & ~{written}\nTEXT: /(?s:.*)/"
    else:
        rules = f"thought[lazy]: /(?s:.*)/ {end}"
    before = f"({begin} thought SPACE?)?" if reasoning.begin else "thought SPACE?"
    first = f"start: {before} @answer\n{rules}\nSPACE: /\\s{{1,8}}/"
    return json.dumps({"grammars": [{"lark_grammar": first}, *parts]})


def _too_long(grammar: Grammar, endless: Grammar) -> RequestError:
    if (grammar.kind, grammar.text) == (endless.kind, endless.text):
        return InvalidRequestError(
            f"compiling the grammar takes over {MAX_COMPILE_S:g} s", field=grammar.field
        )
    return OverloadedError(
        "another grammar takes too long to compile", field=grammar.field, retry_after_ms=_RETRY_MS
    )


def _too_late(grammar: Grammar) -> OverloadedError:
    return OverloadedError(
        f"compiling grammars that came before took over {_MAX_WAIT_S:g} s",
        field=grammar.field,
        retry_after_ms=_RETRY_MS,
    )


def _no_thread(grammar: Grammar) -> OverloadedError:
    return OverloadedError(
        "no thread is left to limit how long the grammar compiles",
        field=grammar.field,
        retry_after_ms=_RETRY_MS,
    )
