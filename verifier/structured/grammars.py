"""Compiles grammars, in one thread of its own, so that a slow one delays other grammars only.

A grammar is the client's. `_LIMITS` bounds what compiling it may cost, and what each token may. A
step's work for an ambiguous grammar is bounded less well: up to some 10 ms for each of its rows. So
an operator says whether clients may send grammars at all.

Each sequence gets matchers of its own, because copies of one share what they count, and its errors.
"""

import enum
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from verifier.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from verifier.structured.grammar_state import GrammarState

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
# The library descends a frame for each rule that leads to another one, and a grammar within the
# limits of the wire may be a chain of thousands. Memory is used as far as the stack grows.
_STACK_BYTES = 512 << 20


class GrammarKind(enum.Enum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as the client wrote it.

    Attributes:
        text: of choices, the strings as a JSON list.
        field: of the request, for errors.
    """

    kind: GrammarKind
    text: str
    field: str = ""


class Grammars:
    """For any thread."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        """Starts the thread, which reads the tokenizer.

        Args:
            tokenizer: the model's tokenizer.json.
            vocab_size: of the model's logits.
            end_token_ids: what may follow when a grammar's text is complete.
        """
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        # A thread gets the stack size of the moment in which it starts.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._tokenizer = self._threads.submit(
                _read_tokenizer, tokenizer, vocab_size, end_token_ids
            )
        finally:
            threading.stack_size(before)

    def compile(
        self, grammar: Grammar, output_token_ids: Sequence[int] = ()
    ) -> "Future[GrammarState]":
        """A sequence's own state, after the output that it has.

        The future's exception is a RequestError if the grammar is wrong or too complex, the output
        does not follow it, or the model's tokenizer cannot be used.

        Raises:
            OverloadedError: too many grammars wait to be compiled.
        """
        with self._lock:
            if self._num_waiting >= _MAX_WAITING:
                raise OverloadedError(
                    f"{self._num_waiting} grammars wait to be compiled",
                    field=grammar.field,
                    retry_after_ms=1000,
                )
            self._num_waiting += 1
        future = self._threads.submit(self._compile, grammar, output_token_ids)
        # Also of one that is cancelled before its turn.
        future.add_done_callback(self._on_done)
        return future

    def close(self) -> None:
        """Ends the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _on_done(self, _: "Future[GrammarState]") -> None:
        with self._lock:
            self._num_waiting -= 1

    def _compile(self, grammar: Grammar, output_token_ids: Sequence[int]) -> GrammarState:
        # It was submitted before.
        tokenizer = self._tokenizer.result()
        if tokenizer is None:
            raise UnsupportedFieldError(
                "the model's tokenizer cannot be used for grammars", field=grammar.field
            )
        try:
            text = _written(grammar)
        except ValueError as error:
            raise _wrong(grammar, str(error)) from None
        matcher, draft_matcher = (
            LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS) for _ in range(2)
        )
        if matcher.is_error():
            raise _wrong(grammar, matcher.get_error())
        state = GrammarState(
            matcher, draft_matcher, vocab_size=self._vocab_size, field=grammar.field
        )
        state.take_in(output_token_ids, 0)
        # The first mask takes the longest; one that is too complex is refused here.
        state.allowed(())
        return state


def _read_tokenizer(
    path: Path, vocab_size: int, end_token_ids: Sequence[int]
) -> LLTokenizer | None:
    """None if the library cannot use it."""
    # A model may name end tokens that have no logit.
    end_token_ids = [each for each in end_token_ids if each < vocab_size]
    try:
        return LLTokenizer(
            path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=end_token_ids
        )
    except (OSError, ValueError):
        return None


def _written(grammar: Grammar) -> str:
    """The grammar in the library's own form."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.CHOICES:
        choices = " | ".join(json.dumps(each) for each in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(grammar.text)


def _wrong(grammar: Grammar, reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason.splitlines()[0], field=grammar.field)
