"""Measures peers by turns: rounds in which each variant runs once, and a start of each alone."""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peers.catalogue import TANDEM, Peer
from benchmarks.peers.protocol import PLAIN, SPECULATION, Options, Request
from benchmarks.peers.worker_process import Memory, PeerError, WorkerProcess, running_worker
from benchmarks.ratios import median_ratio

Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Variant:
    """A peer in one mode with a number of streams: what its rounds gave."""

    peer: str
    mode: str
    streams: int
    tokens_per_s: list[float] = field(default_factory=list)
    # Requests answered as the reference answers them, in the worst round.
    num_identical: int | None = None
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Of a fresh process with everything compiled and converted before."""

    # From the process's start to its first token.
    first_token_s: float
    # After all requests were run, as many at a time as there may be.
    memory: Memory


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Figures of one dtype and number of threads."""

    dtype: str
    threads: int
    variants: list[Variant]
    starts: dict[str, Start] = field(default_factory=dict)
    # By peer.
    errors: dict[str, str] = field(default_factory=dict)

    def ratio_to_tandem(self, variant: Variant) -> float | None:
        """Returns the median over the rounds of the speed over that of Tandem in process, of the
        same kind: plain against plain, drafts against speculation. None if that was not measured.
        """
        mode = PLAIN if variant.mode == PLAIN else SPECULATION
        for other in self.variants:
            if (other.peer, other.mode, other.streams) == (TANDEM, mode, variant.streams):
                if len(other.tokens_per_s) != len(variant.tokens_per_s):
                    return None
                return median_ratio(variant.tokens_per_s, other.tokens_per_s)
        return None


def compare(
    peers: Sequence[tuple[Peer, Path]],
    requests: Sequence[Request],
    reference: Sequence[Sequence[int]],
    *,
    options: Options,
    streams: Sequence[int],
    lookups: Sequence[int],
    rounds: int,
    logs: Path,
    say: Say,
) -> Comparison:
    """Measures peers, each with the interpreter that runs it.

    `reference` is what each request should be answered. A peer or a variant that fails is named
    with its error, and the others go on.
    """
    result = Comparison(dtype=options.dtype, threads=options.threads, variants=[])
    with contextlib.ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        for peer, python in peers:
            if options.dtype not in peer.dtypes:
                result.errors[peer.name] = f"has no {options.dtype} on a CPU"
                continue
            log = logs / f"{peer.name}.log"
            workers[peer.name] = stack.enter_context(
                running_worker(python, peer.worker, options, log)
            )
            result.variants += [
                Variant(peer=peer.name, mode=mode, streams=number)
                for number in streams
                for mode in peer.modes(number, lookups)
            ]
        # Those that are compared run close to each other.
        result.variants.sort(key=lambda variant: variant.streams)
        for variant in result.variants:
            say(f"warms up {variant.peer}, {variant.mode}, {variant.streams}")
            few = requests[: variant.streams]
            _measure(variant, workers[variant.peer], few, reference)
            variant.tokens_per_s.clear()
        for number in range(rounds):
            for variant in result.variants:
                _measure(variant, workers[variant.peer], requests, reference)
                if variant.error is None:
                    say(
                        f"round {number + 1}: {variant.peer}, {variant.mode}, {variant.streams}: "
                        f"{variant.tokens_per_s[-1]:.0f} tokens/s, "
                        f"{variant.num_identical} of {len(requests)} identical"
                    )
    for peer, python in peers:
        mine = [variant for variant in result.variants if variant.peer == peer.name]
        failed = [variant for variant in mine if variant.error is not None]
        if mine and len(failed) == len(mine):
            result.errors[peer.name] = failed[0].error or ""
        elif mine:
            say(f"starts {peer.name}")
            log = logs / f"{peer.name}-start.log"
            with running_worker(python, peer.worker, options, log) as worker:
                try:
                    result.starts[peer.name] = _start(peer, worker, requests, max(streams))
                except PeerError as error:
                    result.errors[peer.name] = f"did not start again: {error}"
    return result


def _measure(
    variant: Variant,
    worker: WorkerProcess,
    requests: Sequence[Request],
    reference: Sequence[Sequence[int]],
) -> None:
    if variant.error is not None:
        return
    try:
        answers = worker.ask(variant.mode, requests, variant.streams)
    except PeerError as error:
        variant.error = str(error)
        return
    variant.tokens_per_s.append(answers.tokens_per_s)
    if len(requests) < len(reference):
        return
    num_identical = sum(
        list(answer) == list(expected)
        for answer, expected in zip(answers.token_ids, reference, strict=True)
    )
    if variant.num_identical is None or num_identical < variant.num_identical:
        variant.num_identical = num_identical


def _start(peer: Peer, worker: WorkerProcess, requests: Sequence[Request], streams: int) -> Start:
    """Asks a fresh worker for one token, then for everything."""
    mode = peer.modes(streams, ())[0]
    worker.ask(mode, [replace(requests[0], max_new_tokens=1)], 1)
    first_token_s = time.perf_counter() - worker.started_at_s
    worker.ask(mode, requests, streams)
    return Start(first_token_s=first_token_s, memory=worker.memory())
