"""Tries grammars in processes of their own, so that a hostile one costs nobody else's anything."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

from verifier.structured.library_grammar import Source
from verifier.structured.library_tokenizer import library_tokenizer
from verifier.structured.trial_process import Begin, Request

_COMMAND = (sys.executable, "-m", "verifier.structured.trial_process")
_MAX_KNOWN = 256
_KILLED = "compiling the grammar was ended by the system"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a grammar may take to compile.

    Attributes:
        cpu_s: of a processor; the system counts whole seconds.
        elapsed_s: by the clock, where processors are busy with other work.
        memory_bytes: of memory. Schemas of 64 KiB take up to some 60 MB.
    """

    # Schemas of 20,000 strings take 0.1 s.
    cpu_s: float = 2.0
    elapsed_s: float = 10.0
    memory_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a grammar.

    Attributes:
        error: why it is refused; "": it is not.
        text: as the library takes it.
        ignored_formats: of its schemas.
        is_final: it would be the same another time.
        is_overload: what it is refused for is not its own.
    """

    error: str = ""
    text: str = ""
    ignored_formats: tuple[str, ...] = ()
    is_final: bool = True
    is_overload: bool = False


class Verdicts:
    """Those of the latest grammars. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()

    def find(self, source: Source) -> Verdict | None:
        with self._lock:
            key = _key(source)
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def add(self, source: Source, verdict: Verdict) -> None:
        with self._lock:
            self._known[_key(source)] = verdict
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)


def _key(source: Source) -> bytes:
    return sha256(repr(source).encode(errors="surrogatepass")).digest()


class Trier:
    """Has one process; starts another one where it has ended. Owned by one thread: the process
    ends with it.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        vocab_size: int,
        end_token_ids: Sequence[int],
        bounds: Bounds,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._bounds = bounds
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        # Guards the two above: `close` is called by another thread.
        self._lock = Lock()

    def start(self) -> None:
        """Starts the process, unless there is one, or this is closed.

        Raises:
            OSError: the system starts none.
        """
        with self._lock:
            if self._process is not None or self._is_closed:
                return
            # It imports what this process does.
            path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        text = ""
        tags: Mapping[str, int] = {}
        with contextlib.suppress(Exception):  # verifiers refuse the grammar then
            text, tags = library_tokenizer(self._tokenizer.read_text(encoding="utf-8"))
        begin: Begin = {
            "tokenizer": text,
            "tags": dict(tags),
            "vocab_size": self._vocab_size,
            "end_token_ids": [each for each in self._end_token_ids if each < self._vocab_size],
            "max_cpu_s": self._bounds.cpu_s,
            "max_memory_bytes": self._bounds.memory_bytes,
            "parent": os.getpid(),
        }
        self._send(begin)

    def close(self) -> None:
        """Ends the process, and whatever it tries. For any thread; idempotent."""
        with self._lock:
            self._is_closed = True
        self._kill()

    def end(self) -> None:
        """After `close`: waits for the end of the process. For the owner."""
        self._kill()
        self._end()

    def try_out(self, source: Source) -> Verdict:
        """Tries a grammar; once more, where the process was killed: it may have had nothing to do
        with that.
        """
        verdict = self._try_once(source)
        return self._try_once(source) if verdict.error == _KILLED else verdict

    def _try_once(self, source: Source) -> Verdict:
        if self._process is not None and self._process.poll() is not None:
            # It ended while it had nothing to do.
            self._end()
        try:
            self.start()
            tags = source.reasoning
            reasoning = None if tags is None else [tags.begin, tags.end]
            request: Request = {
                "kind": source.kind.value,
                "text": source.text,
                "reasoning": reasoning,
            }
            self._send(request)
            line = self._receive()
        except OSError:
            self._kill()
            self._end()
            return Verdict(
                "no process is left to compile the grammar", is_final=False, is_overload=True
            )
        if line is None:
            self._kill()
            self._end()
            return Verdict(
                f"compiling the grammar takes over {self._bounds.elapsed_s:g} s", is_final=False
            )
        if not line.endswith(b"\n"):
            return self._of_end(self._end())
        answer = json.loads(line)
        if "error" in answer:
            return Verdict(answer["error"])
        return Verdict("", answer["text"], tuple(answer["ignored_formats"]))

    def _of_end(self, status: int) -> Verdict:
        if status == -signal.SIGXCPU:
            return Verdict(f"compiling the grammar takes over {self._bounds.cpu_s:g} s")
        if status == -signal.SIGKILL:
            # By whom is not known: also when memory runs out, whoever took it.
            return Verdict(_KILLED, is_final=False)
        limit = self._bounds.memory_bytes >> 20
        return Verdict(f"compiling the grammar takes over {limit} MiB of memory")

    def _send(self, message: Begin | Request) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise BrokenPipeError
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()

    def _receive(self) -> bytes | None:
        """A line; what has no end, if the process ends; None: it takes too long."""
        process = self._process
        if process is None or process.stdout is None:
            raise BrokenPipeError
        deadline_s = time.monotonic() + self._bounds.elapsed_s
        received = b""
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not received.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return None
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                break
            received += part
        return received

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _end(self) -> int:
        """Ends the process, if there is one; its exit status."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            process.communicate()
        return process.wait()
