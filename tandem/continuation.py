"""One request over as many calls as it takes: what the next call asks for, what the caller gets.

    continuation = Continuation(request)
    while (call := continuation.next_call()) is not None:
        for event in <the events of that call>:
            ... continuation.receive(event)
        continuation.end()          # or, if the call failed, continuation.interrupt()

Owns what the caller has: tokens, logprobs, ends, and what the calls that failed have cost. Does no
I/O, and does not decide whether a failed call is repeated (`tandem.transport.retry` does).

A call that follows a failure gives the server all output so far, the seed of the `Started` and the
model that it tells, so that the same model goes on at the next token with the same draws. While the
caller has no output, the whole request is asked for again: of any model, which a further `Started`
tells, until the caller has logprobs of the prompt. Later each choice that has not ended is resumed
by a call of its own, one after the other: they have different outputs, and choice i is the only
choice of a request with the seed of choice i. Without a failure there is one call, and every event
passes unchanged.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import grpc

from tandem.generation import (
    Chunk,
    Event,
    Finished,
    GenerationRequest,
    Started,
    TandemError,
    Traced,
)
from tandem.values import FinishReason, Usage

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class Continuation:
    """The state of one request; owned by the one that reads its stream.

    Invariant: each token, logprob and end was passed on at most once, in order, without a gap.
    """

    def __init__(self, request: GenerationRequest) -> None:
        """Begins before the first call."""
        self._request = request
        self._started: Started | None = None
        # All of them, once the server has started them; and those of the current call.
        self._choices: Sequence[_Choice] = ()
        self._called: Sequence[_Choice] = ()
        # Prompt logprobs of the current call that the caller has already.
        self._num_to_skip = 0

    def next_call(self) -> GenerationRequest | None:
        """Begins the next call and returns what it asks for; None when every choice has ended."""
        if self._started is None:
            return self._request
        unfinished = [choice for choice in self._choices if not choice.is_finished]
        if not unfinished:
            return None
        self._num_to_skip = self._choices[0].num_prompt_logprobs
        request = dataclasses.replace(
            self._request,
            request_id=self._started.request_id,
            sampling=dataclasses.replace(self._request.sampling, seed=self._started.seed),
        )
        if self._has_answer:
            request = dataclasses.replace(request, expected_model_digest=self._started.model_digest)
        if not any(choice.has_output for choice in self._choices):
            self._called = self._choices
            return request
        choice = unfinished[0]
        self._called = [choice]
        has_prompt_logprobs = choice.index > 0 or choice.has_output
        sampling = dataclasses.replace(
            request.sampling,
            seed=seed_of_choice(self._started.seed, choice.index),
            prompt_logprobs=None if has_prompt_logprobs else request.sampling.prompt_logprobs,
        )
        return dataclasses.replace(
            request, sampling=sampling, n=1, output_token_ids=tuple(choice.token_ids)
        )

    def receive(self, event: Event) -> Event | None:
        """Takes the current call's next event; returns what it is to the caller, None: nothing.

        Raises:
            TandemError: INTERNAL, the event does not follow what the caller has.
        """
        match event:
            case Started():
                return self._start(event)
            case Chunk():
                return self._take(event)
            case Finished():
                return self._choice(event).finish(event)
            case Traced():
                index = self._choice(event).index
                if index == event.choice_index:
                    return event
                return dataclasses.replace(event, choice_index=index)

    def end(self) -> None:
        """The current call has ended well.

        Raises:
            TandemError: INTERNAL, although one of its choices has not.
        """
        if self._started is None or not all(choice.is_finished for choice in self._called):
            raise _broken("the stream ended before it was finished")

    def interrupt(self) -> Sequence[Finished]:
        """The current call has failed, and further calls will bring the rest.

        Returns:
            The ends of choices whose last chunk has come: there is nothing to resume. Their usage
            is what the chunks told.
        """
        concluded = []
        for choice in self._called:
            if not choice.is_finished:
                choice.interrupt()
                if choice.finish_reason is not None:
                    assert self._started is not None
                    concluded.append(choice.conclude(self._started.num_prompt_tokens))
        return concluded

    @property
    def _has_answer(self) -> bool:
        """Whether the caller has something that a model made: no other one goes on with it."""
        return any(choice.has_output or choice.num_prompt_logprobs for choice in self._choices)

    def _start(self, started: Started) -> Started | None:
        if self._started is None:
            self._started = started
            num_choices = self._request.n or 1
            self._choices = [_Choice(self._request, index) for index in range(num_choices)]
            self._called = self._choices
            return started
        if started.num_prompt_tokens != self._started.num_prompt_tokens:
            raise _broken(
                f"a prompt of {self._started.num_prompt_tokens} tokens has "
                f"{started.num_prompt_tokens} where it was resumed: another tokenizer"
            )
        if self._has_answer or started.model_digest == self._started.model_digest:
            return None
        self._started = dataclasses.replace(self._started, model_digest=started.model_digest)
        return self._started

    def _take(self, chunk: Chunk) -> Chunk | None:
        choice = self._choice(chunk)
        num_skipped = min(self._num_to_skip, len(chunk.prompt_logprobs))
        if num_skipped or choice.index != chunk.choice_index:
            self._num_to_skip -= num_skipped
            chunk = dataclasses.replace(
                chunk,
                choice_index=choice.index,
                prompt_logprobs=chunk.prompt_logprobs[num_skipped:],
            )
        choice.take(chunk)
        is_empty = not (chunk.token_ids or chunk.text or chunk.prompt_logprobs)
        return None if num_skipped and is_empty else chunk

    def _choice(self, event: Chunk | Traced | Finished) -> "_Choice":
        """The choice of an event of the current call."""
        if event.choice_index >= len(self._called):
            raise _broken(f"the server sent choice {event.choice_index} of {len(self._called)}")
        choice = self._called[event.choice_index]
        if choice.is_finished:
            raise _broken(f"the server sent more of choice {choice.index} after its end")
        return choice


class _Choice:
    """What the caller has of one choice.

    Attributes:
        token_ids: output tokens, those that the request gave included.
        num_prompt_logprobs: those of the prompt that the caller has.
        finish_reason: why it ended, from its last chunk.
        is_finished: whether the caller has its Finished.
    """

    def __init__(self, request: GenerationRequest, index: int) -> None:
        self.index = index
        self.token_ids = list(request.output_token_ids)
        self.num_prompt_logprobs = 0
        self.finish_reason: FinishReason | None = None
        self.is_finished = False
        self._num_given_tokens = len(self.token_ids)
        # Of the calls that were interrupted, and of the current one.
        self._spent: Usage | None = None
        self._current = _ChunkUsage()
        self._num_resumes = 0
        self._is_interrupted = False

    @property
    def has_output(self) -> bool:
        return self.is_finished or len(self.token_ids) > self._num_given_tokens

    def take(self, chunk: Chunk) -> None:
        if chunk.offset != len(self.token_ids):
            raise _broken(
                f"the server sent choice {self.index} from token {chunk.offset} on, after "
                f"{len(self.token_ids)} tokens"
            )
        self._go_on()
        self.token_ids += chunk.token_ids
        self.num_prompt_logprobs += len(chunk.prompt_logprobs)
        self.finish_reason = chunk.finish_reason
        self._current.count(chunk)

    def finish(self, finished: Finished) -> Finished:
        self._go_on()
        self.is_finished = True
        if self._spent is None and finished.choice_index == self.index:
            return finished
        usage = finished.usage if self._spent is None else _sum(self._spent, finished.usage)
        usage = dataclasses.replace(usage, resumes=usage.resumes + self._num_resumes)
        return dataclasses.replace(finished, choice_index=self.index, usage=usage)

    def interrupt(self) -> None:
        """Its tokens are kept; what they cost is what the chunks told."""
        self._is_interrupted = self.has_output
        usage = self._current.usage()
        self._spent = usage if self._spent is None else _sum(self._spent, usage)
        self._current = _ChunkUsage()

    def conclude(self, num_prompt_tokens: int) -> Finished:
        """Its end, where the last chunk has come and Finished has not."""
        assert self.finish_reason is not None
        assert self._spent is not None
        self.is_finished = True
        usage = dataclasses.replace(
            self._spent,
            prompt_tokens=num_prompt_tokens,
            output_tokens=len(self.token_ids),
            resumes=self._num_resumes,
        )
        return Finished(choice_index=self.index, finish_reason=self.finish_reason, usage=usage)

    def _go_on(self) -> None:
        """More of it comes. It was resumed if it had been interrupted after output."""
        self._num_resumes += self._is_interrupted
        self._is_interrupted = False


class _ChunkUsage:
    """The part of a call's usage that its chunks tell."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._accepted_per_position: list[int] = []

    def count(self, chunk: Chunk) -> None:
        self._num_steps += chunk.num_steps
        self._num_draft_tokens += chunk.num_draft_tokens
        self._num_accepted_tokens += chunk.num_accepted_tokens
        if not chunk.num_draft_tokens:
            return
        # Exact where the client keeps up, so that each step is a chunk. Of a chunk with several
        # steps, as many are taken to have had drafts as can have.
        num_drafts = min(chunk.num_steps, chunk.num_draft_tokens)
        self._num_drafts += num_drafts
        positions = self._accepted_per_position
        if num_drafts == 1:
            positions += [0] * (chunk.num_draft_tokens - len(positions))
            for position in range(chunk.num_accepted_tokens):
                positions[position] += 1

    def usage(self) -> Usage:
        return Usage(
            num_steps=self._num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            accepted_per_position=tuple(self._accepted_per_position),
        )


def _sum(spent: Usage, last: Usage) -> Usage:
    """The usage of two calls, the later one's where it is not a sum."""
    positions = itertools.zip_longest(
        spent.accepted_per_position, last.accepted_per_position, fillvalue=0
    )
    return dataclasses.replace(
        last,
        num_steps=spent.num_steps + last.num_steps,
        num_drafts=spent.num_drafts + last.num_drafts,
        num_draft_tokens=spent.num_draft_tokens + last.num_draft_tokens,
        num_accepted_tokens=spent.num_accepted_tokens + last.num_accepted_tokens,
        accepted_per_position=tuple(map(sum, positions)),
    )


def _broken(message: str) -> TandemError:
    return TandemError(grpc.StatusCode.INTERNAL, message)


def seed_of_choice(seed: int, choice_index: int) -> int:
    """The seed of one choice: the request's own for choice 0, else SplitMix64's i-th output.

    Part of the contract (`GenerateRequest.n` in gateway.proto). Source: Steele, Lea, Flood: Fast
    splittable pseudorandom number generators, OOPSLA 2014.
    """
    if choice_index == 0:
        return seed
    mixed = (seed + choice_index * _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
