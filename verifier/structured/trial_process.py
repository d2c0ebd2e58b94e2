"""The process that tries grammars: what compiles for too long, or takes too much, ends it alone.

A grammar is a client's, and nothing cancels a compilation, nor limits its memory. So each is tried
here once; what passes is known to compile within the bounds. The system enforces them, also when
nobody waits any more. The process ends with the thread that started it, or when its input does.

Speaks JSON, a line for a message: `Begin`, then a `Request` for each `Answer`.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TypedDict

from llguidance import LLMatcher, LLTokenizer

from tandem.values import ReasoningTags
from verifier.structured.library_grammar import LIMITS, GrammarKind, Source, library_grammar

# The library descends a frame for each rule that leads to another one, and a grammar within the
# limits of the wire may be a chain of thousands. Memory is used as far as the stack grows.
STACK_BYTES = 512 << 20
_SET_DEATH_SIGNAL = 1
# Nesting that Python reads; the stack above has room for it.
_MAX_FRAMES = 100_000


class Begin(TypedDict):
    """The first message.

    Attributes:
        tokenizer: for the library, as the text of a tokenizer.json.
        tags: as in `LibraryTokenizer`.
        max_cpu_s: of a grammar; whole seconds are enforced.
        max_memory_bytes: of a grammar, beside what the process has before.
        parent: the id of the process that started this one.
    """

    tokenizer: str
    tags: dict[str, int]
    vocab_size: int
    end_token_ids: list[int]
    max_cpu_s: float
    max_memory_bytes: int
    parent: int


class Request(TypedDict):
    """The parts of a `Source`."""

    kind: str
    text: str
    reasoning: list[str] | None


class Answer(TypedDict, total=False):
    """What became of it.

    Attributes:
        error: why it is refused; else, `text`: as the library takes it.
        ignored_formats: of its schemas.
    """

    error: str
    text: str
    ignored_formats: list[str]


def main() -> None:
    """Tries what comes, until nothing comes any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin: Begin = json.loads(sys.stdin.buffer.readline() or sys.exit())
    _die_with(begin["parent"])
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_try_all, args=[begin])
    thread.start()
    thread.join()


def _die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
    # Where memory runs out, the verifier goes on.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _try_all(begin: Begin) -> None:
    sys.setrecursionlimit(_MAX_FRAMES)
    tokenizer: LLTokenizer | None = None
    with contextlib.suppress(BaseException):  # also what the library panics with
        tokenizer = LLTokenizer(
            begin["tokenizer"], n_vocab=begin["vocab_size"], eos_token=begin["end_token_ids"]
        )
    _limit_memory(begin["max_memory_bytes"])
    for line in sys.stdin.buffer:
        request: Request = json.loads(line)
        _limit_cpu(begin["max_cpu_s"])
        print(json.dumps(_try(tokenizer, begin["tags"], request)), flush=True)


def _try(tokenizer: LLTokenizer | None, tags: dict[str, int], request: Request) -> Answer:
    try:
        tagged = request["reasoning"]
        reasoning = None if tagged is None else ReasoningTags(begin=tagged[0], end=tagged[1])
        source = Source(GrammarKind(request["kind"]), request["text"], reasoning)
        grammar = library_grammar(source, tags)
        if tokenizer is not None:
            matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                # The first mask takes the longest.
                matcher.compute_bitmask()
            if matcher.is_error():
                return Answer(error=grammar.named(matcher.get_error()))
        return Answer(text=grammar.text, ignored_formats=grammar.ignored_formats)
    except ValueError as error:
        return Answer(error=str(error))
    except MemoryError:
        os.abort()
    except BaseException as error:  # also what the library panics with
        return Answer(error=f"the grammar library failed: {error}")


def _limit_memory(max_bytes: int) -> None:
    try:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (held + max_bytes, held + max_bytes))


def _limit_cpu(max_s: float) -> None:
    used: Any = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime + max_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


if __name__ == "__main__":
    main()
