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
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from servicekit.errors import RequestError
from servicekit.logs import Logger
from verifier.errors import OverloadedError, UnsupportedFieldError
from verifier.structured.grammar import Grammar
from verifier.structured.grammar_state import GrammarState, wrong_grammar
from verifier.structured.grammar_tokenizer import GrammarTokenizer, read_tokenizer
from verifier.structured.library_grammar import GrammarKind
from verifier.structured.trial_process import STACK_BYTES
from verifier.structured.trials import Bounds, Trier, Verdict, Verdicts
from verifier.structured.waiting_jobs import MAX_WAITING, Job, WaitingJobs

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


class Grammars:
    """Compiles grammars in a thread of its own. For any thread."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        max_num_states: int = MAX_WAITING,
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
        self._jobs = WaitingJobs()
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
        job = Job(grammar, output_token_ids, is_drafted, tenant, priority)
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
        tokenizer = read_tokenizer(path, self._vocab_size, end_token_ids)
        while (job := self._next_job()) is not None:
            self._work(tokenizer, job)
            # While the thread waits, it keeps no state alive.
            del job

    def _work(self, tokenizer: GrammarTokenizer | None, job: Job) -> None:
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

    def _try_out(self, trier: Trier, job: Job) -> None:
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

    def _next_to_try(self) -> Job | None:
        """Waits for one; None once it is closed."""
        with self._changed:
            while not self._is_closed:
                if (job := self._jobs.next_to_try(self._tried_now)) is not None:
                    self._tried_now.append(job.grammar)
                    return job
                self._changed.wait()
        return None

    def _next_job(self) -> Job | None:
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

    def _take_jobs(self) -> list[Job]:
        """Removes and returns the jobs that wait."""
        with self._changed:
            return self._jobs.take_older(math.inf)

    def _on_done(self, future: "Future[GrammarState]") -> None:
        with self._changed:
            self._jobs.discard(future)

    def _compile_observed(self, tokenizer: GrammarTokenizer | None, job: Job) -> GrammarState:
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

    def _compile(self, tokenizer: GrammarTokenizer | None, job: Job) -> GrammarState:
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
