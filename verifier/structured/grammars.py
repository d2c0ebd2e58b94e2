"""Compiles grammars, in threads of their own, so that a slow one delays other grammars only.

A grammar is the client's, and nothing cancels a compilation. So each is first tried in a process of
its own, with bounds of time and memory (`trials.py`): what is over them is refused. What passes is
compiled here, and need not be tried again for some time. There are two such processes, so that one
goes on while a grammar keeps the other. `LIMITS` bounds a grammar's size, and the items and states
of each step. A row of a step may take up to some 60 ms, with long literals after drafts. So an
operator says whether clients may send grammars at all.

A compiled grammar may hold 60 MB. So only some are compiled before their sequences run; further
ones wait as texts until a sequence with a grammar ends. Tenants take turns at the threads. Those of
a low priority may wait for long to run, and take no place of those that run before them.

Each sequence gets matchers of its own, because copies of one share what they count, and its errors.
"""

import atexit
import contextlib
import functools
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from servicekit.errors import RequestError
from servicekit.logs import Logger
from servicekit.shares import leaves_room
from tandem.values import ReasoningTags
from verifier.errors import OverloadedError, UnsupportedFieldError
from verifier.structured.grammar_state import GrammarState, wrong_grammar
from verifier.structured.library_grammar import LIMITS, GrammarKind, Source
from verifier.structured.library_tokenizer import library_tokenizer
from verifier.structured.trial_process import STACK_BYTES
from verifier.structured.trials import Bounds, Trier, Verdict, Verdicts

__all__ = ["Grammar", "GrammarKind", "Grammars"]

_MAX_WAITING = 1024
# How long the thread may be at work on others' grammars before one that waits is rejected.
_MAX_WAIT_S = 30.0
_RETRY_MS = 1000
# Processes that try grammars.
_NUM_TRIERS = 2
_BOUNDS = Bounds()
# Formats that are ignored are logged once, and no more than so many.
_MAX_LOGGED_FORMATS = 64
_MAX_FORMAT_CHARACTERS = 64
# How long the end waits for a grammar that compiles.
_LAST_COMPILE_S = 5.0
# What texts that must come may begin with: how many answers are kept, and of how long a text. Most
# texts are short and come again.
_MAX_BEGINNINGS = 4096
_MAX_TEXT_BYTES = 64


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

    @property
    def source(self) -> Source:
        """What two sequences of one grammar have in common."""
        return Source(self.kind, self.text, self.reasoning)


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
        bounds: Bounds = _BOUNDS,
        logger: Logger | None = None,
    ) -> None:
        """Starts the threads, of which one reads the tokenizer, and a process that tries grammars.

        Args:
            tokenizer: the model's tokenizer.json.
            vocab_size: of the model's logits.
            end_token_ids: what may follow when a grammar's text is complete.
            max_num_states: how many states may be in use. While so many are, nothing is compiled.
                Three quarters are more than can run, so that it never keeps a sequence from
                running; the others are for priorities above the lowest that is in use.
            on_compiled: called for each grammar, by one thread at a time: its kind, whether it can
                be used, and how long compiling it took, in seconds.
            bounds: of what a grammar may take.
            logger: is told of formats that are ignored.
        """
        self._on_compiled = on_compiled
        self._reporting = threading.Lock()
        self._logger = logger
        self._logged_formats: set[str] = set()
        self._verdicts = Verdicts()
        # Equal ones wait for the verdict.
        self._tried_now: list[Grammar] = []
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
        # A daemon: the process's end does not wait for ever for a grammar that compiles.
        self._thread = threading.Thread(
            target=self._run,
            args=(tokenizer, end_token_ids),
            name="grammar",
            daemon=True,
        )
        self._triers = [
            Trier(tokenizer, vocab_size=vocab_size, end_token_ids=end_token_ids, bounds=bounds)
            for _ in range(_NUM_TRIERS)
        ]
        self._trying = [
            threading.Thread(target=self._try_all, args=[each], name="grammar-trial", daemon=True)
            for each in self._triers
        ]
        # A thread gets the stack size of the moment in which it starts.
        before = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)
        for each in self._trying:
            each.start()
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
            OverloadedError: too many wait to be compiled.
        """
        job = _Job(grammar, output_token_ids, is_drafted, tenant, priority)
        job.verdict = self._verdicts.find(grammar.source)
        with self._changed:
            if not self._jobs.has_room(tenant):
                raise OverloadedError(
                    f"{len(self._jobs)} grammars wait to be compiled",
                    field=grammar.field,
                    retry_after_ms=_RETRY_MS,
                )
            self._jobs.add(job)
            self._changed.notify_all()
        job.future.add_done_callback(self._on_done)
        return job.future

    def close(self) -> None:
        """Ends the processes, and the threads, after the grammar that one compiles; cancels those
        that wait.

        Blocks for that grammar, up to `_LAST_COMPILE_S`. Idempotent; the process's end calls it.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for trier in self._triers:
            trier.close()
        for job in self._take_jobs():
            job.future.cancel()
        for thread in self._trying:
            thread.join(_LAST_COMPILE_S)
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
        try:
            state = self._compile_observed(tokenizer, job)
            job.future.set_result(self._counted(state, job.priority))
        except RequestError as error:
            # Its traceback leads to the matchers, and back to the future.
            job.future.set_exception(error.with_traceback(None))
        except BaseException as error:  # also what the library panics with
            job.future.set_exception(error)

    def _try_all(self, trier: Trier) -> None:
        if trier is self._triers[0]:
            with contextlib.suppress(OSError):  # it is tried again for the first grammar
                trier.start()
        while (job := self._next_to_try()) is not None:
            try:
                self._try_out(trier, job)
            except Exception as error:
                with contextlib.suppress(InvalidStateError):
                    job.future.set_exception(error)
            with self._changed:
                self._tried_now.remove(job.grammar)
                self._changed.notify_all()
            del job
        trier.end()

    def _try_out(self, trier: Trier, job: "_Job") -> None:
        grammar, start_s = job.grammar, time.perf_counter()
        verdict = trier.try_out(grammar.source)
        self._log_ignored(verdict)
        if verdict.is_final:
            self._verdicts.add(grammar.source, verdict)
        if verdict.error:
            self._report(grammar.kind, False, start_s)
        with self._changed:
            equal = self._jobs.of_text(grammar) if verdict.is_final else [job]
            for each in equal:
                each.verdict = None if verdict.error else verdict
            self._changed.notify_all()
        for each in equal if verdict.error else ():
            with contextlib.suppress(InvalidStateError):
                each.future.set_exception(_error_of(verdict, each.grammar))

    def _log_ignored(self, verdict: Verdict) -> None:
        for name in verdict.ignored_formats:
            name = name[:_MAX_FORMAT_CHARACTERS]
            with self._changed:
                logged = self._logged_formats
                if self._logger is None or name in logged or len(logged) >= _MAX_LOGGED_FORMATS:
                    continue
                logged.add(name)
            self._logger.warning("schema_format_ignored", format=name)

    def _next_to_try(self) -> "_Job | None":
        """Waits for one; None once it is closed."""
        with self._changed:
            while not self._is_closed:
                if (job := self._jobs.next_to_try(self._tried_now)) is not None:
                    self._tried_now.append(job.grammar)
                    return job
                self._changed.wait()
        return None

    def _next_job(self) -> "_Job | None":
        """Waits for one, and for room for its state; rejects those that waited too long. None once
        it is closed.
        """
        while True:
            with self._changed:
                while not (self._is_closed or (self._jobs.has_tried and self._has_room())):
                    self._changed.wait()
                    self._busy_since_s = time.monotonic()
                if self._is_closed:
                    return None
                # Before that, they waited for room, as sequences wait to run.
                long_ago_s = time.monotonic() - _MAX_WAIT_S
                is_late = self._busy_since_s < long_ago_s
                late = self._jobs.take_older(long_ago_s) if is_late else []
                job = self._jobs.take_next() if self._jobs.has_tried else None
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
            self._changed.notify_all()

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
            self._report(job.grammar.kind, can_be_used, start_s)

    def _report(self, kind: GrammarKind, can_be_used: bool, start_s: float) -> None:
        if self._on_compiled is not None:
            with self._reporting:
                self._on_compiled(kind, can_be_used, time.perf_counter() - start_s)

    def _compile(self, tokenizer: "_Tokenizer | None", job: "_Job") -> GrammarState:
        grammar = job.grammar
        if tokenizer is None:
            raise UnsupportedFieldError(
                "the model's tokenizer cannot be used for grammars", field=grammar.field
            )
        assert job.verdict is not None, "a grammar that was not tried"
        if job.verdict.error:
            raise _error_of(job.verdict, grammar)
        text = job.verdict.text
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


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar to compile for a sequence with this output.

    Attributes:
        verdict: what is known of it; None: nothing yet.
    """

    grammar: Grammar
    output_token_ids: Sequence[int]
    is_drafted: bool
    tenant: str
    priority: int
    future: "Future[GrammarState]" = field(default_factory=Future)
    arrived_at_s: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None


class _Turns:
    """The last turns of tenants."""

    def __init__(self) -> None:
        # Oldest first. Whoever is not among them had none of late.
        self._last: OrderedDict[str, int] = OrderedDict()
        self._num_turns = 0

    def last(self, tenant: str) -> int:
        return self._last.get(tenant, 0)

    def take(self, tenant: str) -> None:
        self._num_turns += 1
        self._last[tenant] = self._num_turns
        self._last.move_to_end(tenant)
        if len(self._last) > _MAX_WAITING:
            self._last.popitem(last=False)


class _WaitingJobs:
    """The jobs that wait. The highest priority is next; of it, the tenant whose last turn is
    longest ago, whatever others wait with; of this tenant, the oldest job.
    """

    def __init__(self) -> None:
        # Oldest first.
        self._jobs: OrderedDict[Future[GrammarState], _Job] = OrderedDict()
        # Of compiling, and of being tried.
        self._turns = _Turns()
        self._tries = _Turns()

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def has_tried(self) -> bool:
        """Whether there is a next job."""
        return any(job.verdict is not None for job in self._jobs.values())

    @property
    def highest_priority(self) -> int:
        """That of the next job; there must be one."""
        return max(job.priority for job in self._jobs.values() if job.verdict is not None)

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
        jobs = (job for job in self._jobs.values() if job.verdict is not None)
        job = min(jobs, key=lambda each: (-each.priority, self._turns.last(each.tenant)))
        del self._jobs[job.future]
        self._turns.take(job.tenant)
        return job

    def next_to_try(self, tried: Sequence[Grammar]) -> _Job | None:
        """One of which nothing is known, and whose text is not tried just now; it stays here."""
        now = {each.source for each in tried}
        jobs = [
            job
            for job in self._jobs.values()
            if job.verdict is None and job.grammar.source not in now
        ]
        if not jobs:
            return None
        job = min(jobs, key=lambda each: (-each.priority, self._tries.last(each.tenant)))
        self._tries.take(job.tenant)
        return job

    def of_text(self, grammar: Grammar) -> list[_Job]:
        """Those of which nothing is known, with the same grammar."""
        wanted = grammar.source
        return [
            job
            for job in self._jobs.values()
            if job.verdict is None and job.grammar.source == wanted
        ]

    def take_older(self, arrived_at_s: float) -> list[_Job]:
        """Removes and returns the jobs that arrived before that."""
        taken = []
        while self._jobs and next(iter(self._jobs.values())).arrived_at_s < arrived_at_s:
            taken.append(self._jobs.popitem(last=False)[1])
        return taken


class _Tokenizer:
    """The library's, which can be used.

    Attributes:
        end_token_ids: what may follow when a grammar's text is complete.
    """

    def __init__(self, tokenizer: LLTokenizer, end_token_ids: frozenset[int]) -> None:
        self.end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._begins = functools.lru_cache(_MAX_BEGINNINGS)(self._compute_begins)

    def matcher(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

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
        text, _ = library_tokenizer(path.read_text(encoding="utf-8"))
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end_token_ids)
        return _Tokenizer(tokenizer, frozenset(end_token_ids))
    except BaseException:  # also what the library panics with
        return None


def _too_late(grammar: Grammar) -> OverloadedError:
    return OverloadedError(
        f"compiling grammars that came before took over {_MAX_WAIT_S:g} s",
        field=grammar.field,
        retry_after_ms=_RETRY_MS,
    )


def _error_of(verdict: Verdict, grammar: Grammar) -> RequestError:
    if verdict.is_overload:
        return OverloadedError(verdict.error, field=grammar.field, retry_after_ms=_RETRY_MS)
    return wrong_grammar(verdict.error, grammar.field)
