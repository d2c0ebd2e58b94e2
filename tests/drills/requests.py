"""Requests of the drills, and what their clients get, message by message.

Owns the record of a stream, and the comparison with the output of an undisturbed run. Calls the
gateway by its stubs: `tandem.client` would hide offsets, and what it repairs.
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from benchmarks.workloads import BUNDLED_MODEL, rename_tasks
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, sampling_pb2

# Requests differ by these; each kind is taken in turn.
_KINDS = ("greedy", "seeded", "logprobs", "choices", "plain", "penalties")

# As `tandem.client` has it.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

# Of a client that goes on through another gateway.
_GIVE_UP_AFTER_S = 60.0
_RETRY_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk with tokens, as it came.

    Attributes:
        offset: output tokens before it, as it says.
        at_s: when it came, in Unix seconds, as logs have them.
    """

    choice_index: int
    offset: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class Losses:
    """Tokens of one or more streams that differ from the undisturbed run."""

    num_lost: int = 0
    num_repeated: int = 0
    num_changed: int = 0

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(
            self.num_lost + other.num_lost,
            self.num_repeated + other.num_repeated,
            self.num_changed + other.num_changed,
        )


@dataclass(slots=True, kw_only=True)
class Record:
    """What a client got for one request, over one or more calls.

    Attributes:
        started_at_s: when the first call began, in Unix seconds.
        usages: of the choices that finished.
        codes: how each call ended.
        ends: of each call, when that was, in Unix seconds, and how many pieces had come.
        error: of the last call that failed.
    """

    request: gateway_pb2.GenerateRequest
    started_at_s: float = field(default_factory=time.time)
    pieces: list[Piece] = field(default_factory=list)
    usages: dict[int, gateway_pb2.Usage] = field(default_factory=dict)
    codes: list[grpc.StatusCode] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_choices(self) -> int:
        return self.request.n or 1

    @property
    def num_resumes(self) -> int:
        """Times that a gateway moved one of its choices."""
        return sum(usage.resumes for usage in self.usages.values())

    def token_ids(self, choice_index: int) -> list[int]:
        """The tokens of a choice in the order in which they came."""
        return [
            token_id
            for piece in self.pieces
            if piece.choice_index == choice_index
            for token_id in piece.token_ids
        ]

    def add(self, response: gateway_pb2.GenerateResponse) -> None:
        if response.HasField("chunk") and response.chunk.token_ids:
            chunk = response.chunk
            self.pieces.append(
                Piece(
                    choice_index=chunk.choice_index,
                    offset=chunk.offset,
                    token_ids=tuple(chunk.token_ids),
                    logprobs=tuple(each.logprob for each in chunk.logprobs),
                    at_s=time.time(),
                )
            )
        elif response.HasField("finished"):
            self.usages[response.finished.choice_index] = response.finished.usage
        self._has_news.set()

    def end(self, code: grpc.StatusCode) -> None:
        """A call of the request has ended."""
        self.codes.append(code)
        self.ends.append((time.time(), len(self.pieces)))
        self._has_news.set()

    async def has_tokens(self, num_tokens: int) -> None:
        """Waits until every choice has so many tokens, or a call has ended."""
        while not self.codes and any(
            len(self.token_ids(index)) < num_tokens for index in range(self.num_choices)
        ):
            self._has_news.clear()
            await self._has_news.wait()

    def compare(self, expected: "Record", *, is_whole: bool = True) -> Losses:
        """Counts the tokens that the stream lacks, has twice, or has wrong.

        Args:
            expected: of the same request, undisturbed.
            is_whole: whether all tokens should be there; otherwise only those that came count.
        """
        losses = Losses()
        for index in range(self.num_choices):
            losses += self._compare_choice(expected, index, is_whole)
        return losses

    def _compare_choice(self, expected: "Record", index: int, is_whole: bool) -> Losses:
        right = {
            piece.offset + i: (token_id, piece.logprobs[i] if piece.logprobs else 0.0)
            for piece in expected.pieces
            if piece.choice_index == index
            for i, token_id in enumerate(piece.token_ids)
        }
        num_lost = num_repeated = num_changed = 0
        position = 0
        for piece in self.pieces:
            if piece.choice_index != index:
                continue
            num_lost += max(0, piece.offset - position)
            num_repeated += max(0, min(position - piece.offset, len(piece.token_ids)))
            for i, token_id in enumerate(piece.token_ids):
                logprob = piece.logprobs[i] if piece.logprobs else 0.0
                num_changed += right.get(piece.offset + i) != (token_id, logprob)
            position = max(position, piece.offset + len(piece.token_ids))
        if is_whole:
            num_lost += max(0, len(right) - position)
        return Losses(num_lost, num_repeated, num_changed)


def mixed_requests(
    count: int, *, num_tokens: int, num_choices: int = 3
) -> list[gateway_pb2.GenerateRequest]:
    """Requests of every kind: greedy, seeded, with logprobs, several choices, without drafts, with
    penalties.

    Args:
        num_tokens: of each choice.
        num_choices: of the kind that has several.
    """
    requests = []
    for index, task in enumerate(rename_tasks(BUNDLED_MODEL, count)):
        kind = _KINDS[index % len(_KINDS)]
        sampling = sampling_pb2.SamplingParams(seed=index)
        if kind != "greedy" and kind != "plain":
            sampling.temperature = 0.8
        if kind == "logprobs":
            sampling.logprobs = 2
        if kind == "penalties":
            sampling.presence_penalty, sampling.repetition_penalty = 0.3, 1.1
        request = gateway_pb2.GenerateRequest(
            tokens=gateway_pb2.TokenIds(token_ids=task.prompt_token_ids),
            sampling=sampling,
            max_new_tokens=num_tokens,
            ignore_eos=True,
            n=num_choices if kind == "choices" else 1,
        )
        if kind == "plain":
            request.speculation.enabled = False
        requests.append(request)
    return requests


async def generate(
    channel: grpc.aio.Channel,
    record: Record,
    *,
    timeout_s: float | None = None,
    token: str | None = None,
) -> None:
    """One call of the record's request, read to its end; no error is raised, `codes` has it.

    Output that the record has already is what the client resumes from.

    Args:
        timeout_s: its deadline.
        token: the client's bearer token.
    """
    request = gateway_pb2.GenerateRequest()
    request.CopyFrom(record.request)
    if record.pieces:
        assert record.num_choices == 1, "choices cannot go on in another call"
        request.output_token_ids.extend(record.token_ids(0))
    call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
        request,
        timeout=timeout_s,
        metadata=[("authorization", f"Bearer {token}")] if token else None,
    )
    try:
        async for response in call:
            record.add(response)
    except grpc.aio.AioRpcError as error:
        record.error = error
        record.end(error.code())
    except asyncio.CancelledError:
        call.cancel()
        record.end(grpc.StatusCode.CANCELLED)
        raise
    else:
        record.end(grpc.StatusCode.OK)


async def generate_anywhere(channels: Sequence[grpc.aio.Channel], record: Record) -> None:
    """The request by one gateway after the other, while calls end because a gateway does.

    Each goes on from the tokens that came. Gives up after a minute.
    """
    deadline_s = time.monotonic() + _GIVE_UP_AFTER_S
    for channel in itertools.cycle(channels):
        await generate(channel, record)
        if record.codes[-1] not in _GONE or time.monotonic() > deadline_s:
            return
        if len(record.token_ids(0)) >= record.request.max_new_tokens:
            # Only the end was lost.
            record.end(grpc.StatusCode.OK)
            return
        await asyncio.sleep(_RETRY_INTERVAL_S)
