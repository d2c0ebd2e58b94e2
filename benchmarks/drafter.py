"""The drafter's speed: its index, and its stream over the wire.

    python -m benchmarks.drafter [--quick] [--json FILE]

- proposals: distinct histories in shuffled order, a token appended to each, as in a server with
  hundreds of long contexts; caches are cold before each call. Nanoseconds per proposal, and to
  index the appended token, which the server does after its response; best of the rounds, median.
- texts: nanoseconds to append and index a token of a new text, and bytes per token at the end.
- stream: round trips on `ProposeStream` with a drafter process, 8 new tokens per sequence, with
  and without a verifier's step between two of them; and proposals per second over four streams.

Compare figures of one run only: other work on the machine slows everything down. For kernels, the
best round stands beside the median, since a round is a fraction of a millisecond.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.arguments import command_parser, write_figures
from benchmarks.drafter_texts import PARAMS, Call, propose
from benchmarks.machine import processor
from benchmarks.report import table
from benchmarks.services import running_process
from drafter.budgets import MAX_UNINDEXED
from drafter.ngram.index import DONE
from drafter.ngram.params import Algorithm, NgramParams
from drafter.ngram.text import IndexedText
from drafter.warm_up import warm_up
from tandem.v1 import drafter_pb2 as pb

Tokens = npt.NDArray[np.uint32]
Stream = grpc.aio.StreamStreamCall[bytes, bytes]

POLICIES = {
    "index, longest": PARAMS,
    "index, earliest": NgramParams(),
    "KMP, earliest": NgramParams(algorithm=Algorithm.KMP),
}
LENGTHS = (1_000, 8_000, 131_000)
NUM_HISTORIES, DRAFT_TOKENS = 256, 8
MAX_TOKENS = 1 << 20
# Larger than any cache: writing it evicts everything else.
_FLUSH_BYTES = 128 << 20

_PROPOSE = "/tandem.v1.DrafterService/ProposeStream"
BATCHES = (1, 64, 256)
# Between requests: a verifier's step, and none.
PAUSES_S = (0.005, 0.0)
PROMPT_TOKENS, TOKENS_PER_STEP, MAX_DRAFT_TOKENS = 1000, 8, 24


def main(argv: Sequence[str] | None = None) -> None:
    arguments = command_parser("drafter", __doc__).parse_args(argv)
    print(processor())
    warm_up()
    proposals, texts = _measure_kernels(arguments)
    result: dict[str, Any] = {"proposals": proposals, "texts": texts}
    result["stream"] = asyncio.run(_measure_stream(arguments))
    for name, rows in result.items():
        print(f"\n{name}\n\n{table(rows)}")
    write_figures("drafter", arguments, result)


def _measure_kernels(
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tables `proposals` and `texts`."""
    num_rounds = 2 if arguments.quick else 11
    proposals, built = [], []
    for policy, params in POLICIES.items():
        for num_tokens in LENGTHS[:1] if arguments.quick else LENGTHS:
            # Each token occurs once in a history, so only constructed matches hit.
            rng = np.random.default_rng(num_tokens)
            source = rng.permutation(num_tokens + NUM_HISTORIES * 64).astype(np.uint32)
            started_at_s = time.perf_counter()
            texts = [_build(params, source[i * 64 :][:num_tokens]) for i in range(NUM_HISTORIES)]
            total = NUM_HISTORIES * num_tokens
            built.append(
                {
                    "policy": policy,
                    "tokens": num_tokens,
                    "ns per token": round((time.perf_counter() - started_at_s) / total * 1e9, 1),
                    "bytes per token": round(sum(t.allocated_bytes for t in texts) / total, 1),
                }
            )
            for hits in (False, True):
                times_ns = _ask(texts, source, num_tokens, num_rounds, hits=hits)
                proposals.append(
                    {
                        "policy": policy,
                        "tokens": num_tokens,
                        "match": "hit" if hits else "miss",
                        **{
                            f"{what}, {how}": round(statistic(each))
                            for what, each in times_ns.items()
                            for how, statistic in (("best", min), ("median", statistics.median))
                        },
                    }
                )
    return proposals, built


def _build(params: NgramParams, tokens: Tokens) -> IndexedText:
    text = IndexedText(params=params, max_tokens=MAX_TOKENS)
    for start in range(0, len(tokens), 8192):
        text.append(tokens[start : start + 8192])
        propose([text], [0])
    return text


def _ask(
    texts: Sequence[IndexedText], source: Tokens, num_tokens: int, num_rounds: int, *, hits: bool
) -> dict[str, list[float]]:
    """Nanoseconds per text of the proposal and of the indexing that follows, of each round."""
    rng = np.random.default_rng(1)
    flush = np.zeros(_FLUSH_BYTES, dtype=np.uint8)
    times_ns: dict[str, list[float]] = {"proposal": [], "index": []}
    fresh = 2**31
    for _ in range(num_rounds):
        order = rng.permutation(len(texts))
        for i in order:
            if hits:
                # Repeats four tokens of the history; the fifth is appended below.
                start = i * 64 + int(rng.integers(0, num_tokens - 32))
                appended = source[start : start + 5]
            else:
                appended = np.arange(fresh, fresh + 5, dtype=np.uint32)
                fresh += 5
            texts[i].append(appended[:4])
            propose([texts[i]], [0])
            texts[i].append(appended[4:])
        batch = [texts[i] for i in order]
        for what, max_tokens in (("proposal", DRAFT_TOKENS), ("index", 0)):
            flush += 1
            times_ns[what].append(_time_call(batch, max_tokens) / len(batch))
    return times_ns


def _time_call(texts: Sequence[IndexedText], max_tokens: int) -> float:
    """Nanoseconds of one kernel call on one thread."""
    call = Call(texts, [max_tokens] * len(texts), budget=1 << 40, max_unindexed=MAX_UNINDEXED)
    started_at_ns = time.perf_counter_ns()
    call.run()
    duration_ns = time.perf_counter_ns() - started_at_ns
    for text, status in zip(texts, call.statuses.tolist(), strict=True):
        if status != DONE:
            # A table had to grow, which is rare: its proposal is left out.
            propose([text], [0])
    return duration_ns


async def _measure_stream(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    num_steps = 40 if arguments.quick else 600
    one_stream = [(1, *case) for case in itertools.product(PAUSES_S, BATCHES)]
    rows = []
    with running_process("drafter") as drafter:
        async with grpc.aio.insecure_channel(drafter.address) as channel:
            for num_streams, pause_s, num_sequences in (*one_stream, (4, 0.0, 16), (4, 0.0, 64)):
                prepared = [
                    await _prepare(
                        channel, f"{i} {pause_s} {num_sequences}", num_sequences, num_steps
                    )
                    for i in range(num_streams)
                ]
                started_at_s = time.perf_counter()
                runs = await asyncio.gather(*(_round_trips(*each, pause_s) for each in prepared))
                took_ms = [each for run in runs for each in run]
                duration_s = time.perf_counter() - started_at_s
                rows.append(
                    {
                        "streams": num_streams,
                        "sequences": num_sequences,
                        "pause, ms": pause_s * 1e3,
                        "p50, ms": round(statistics.median(took_ms), 2),
                        "p99, ms": round(statistics.quantiles(took_ms, n=100)[98], 2),
                        "proposals/s": round(len(took_ms) * num_sequences / duration_s),
                    }
                )
                for stream, _ in prepared:
                    stream.cancel()
    return rows


async def _prepare(
    channel: grpc.aio.Channel, name: str, num_sequences: int, num_steps: int
) -> tuple[Stream, list[bytes]]:
    """A stream with so many sequences, and requests for it."""
    stream: Stream = channel.stream_stream(_PROPOSE)()
    creations, steps = _requests(name, num_sequences, num_steps)
    for request in creations:
        await _exchange(stream, request)
    return stream, steps


async def _round_trips(stream: Stream, requests: Sequence[bytes], pause_s: float) -> list[float]:
    """Milliseconds of each. The client sends prepared bytes and does not parse responses."""
    took_ms = []
    for request in requests:
        await asyncio.sleep(pause_s)
        started_at_s = time.perf_counter()
        await _exchange(stream, request)
        took_ms.append((time.perf_counter() - started_at_s) * 1e3)
    return took_ms


def _requests(name: str, num_sequences: int, num_steps: int) -> tuple[list[bytes], list[bytes]]:
    """Serialized requests: those that create the sequences, and one per step."""
    draw = random.Random(name)
    ids = [f"{draw.getrandbits(128):032x}" for _ in range(num_sequences)]

    def words() -> Iterator[int]:
        # They recur, so that most proposals hit.
        while True:
            first = draw.randrange(60) * 60
            yield from range(first, first + 12)

    def text(num_tokens: int) -> list[int]:
        return list(itertools.islice(words(), num_tokens))

    creations = [
        pb.ProposeRequest(
            sequences=[
                pb.SequenceDelta(sequence_id=id_, token_ids=text(PROMPT_TOKENS))
                for id_ in ids[start : start + 16]
            ]
        )
        for start in range(0, num_sequences, 16)
    ]
    steps = [
        pb.ProposeRequest(
            batch_id=number + 1,
            sequences=[
                pb.SequenceDelta(
                    sequence_id=id_,
                    base_length=PROMPT_TOKENS + number * TOKENS_PER_STEP,
                    token_ids=text(TOKENS_PER_STEP),
                    max_draft_tokens=MAX_DRAFT_TOKENS,
                )
                for id_ in ids
            ],
        )
        for number in range(num_steps)
    ]
    return [r.SerializeToString() for r in creations], [r.SerializeToString() for r in steps]


async def _exchange(stream: Stream, request: bytes) -> None:
    await stream.write(request)
    assert isinstance(await stream.read(), bytes), "the stream has ended"


if __name__ == "__main__":
    main()
