"""One request from its admission to its last Finished.

Owns admission, the making of a request's generations and the reading of what they show. Knows no
transport: gRPC and HTTP are adapters around `Frontend.generate`, and close it when their client
goes away.
"""

import asyncio
import concurrent.futures
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence

from gateway import validation
from gateway.coordinator import Coordinator
from gateway.errors import (
    RETRY_AFTER_MS,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from gateway.fleet import Fleet, no_verifier
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.output_text import OutputText
from gateway.request import (
    AcceptedRequest,
    Finished,
    GenerateEvent,
    GenerateRequest,
    Model,
    Started,
)
from gateway.seeds import seed_of_choice
from gateway.tokenization import Tokenizer
from gateway.validation import RequestDefaults
from servicekit.errors import RequestError

# Shorter texts are encoded in less time than it takes to hand them to a thread and back.
_ENCODE_INLINE_CHARACTERS = 2_000


class Frontend:
    """The core behind every door; on the event loop."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        fleet: Fleet,
        tokenizer: Tokenizer | None,
        defaults: RequestDefaults,
        max_concurrent_requests: int,
        metrics: GatewayMetrics,
    ) -> None:
        """Begins open.

        Args:
            coordinator: runs what is accepted.
            fleet: says which models there are.
            tokenizer: None: token ids in, token ids out.
            defaults: what requests leave open.
            max_concurrent_requests: most choices at a time, over all requests.
            metrics: the gateway's.
        """
        self._coordinator = coordinator
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._max_concurrent_requests = max_concurrent_requests
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        # One thread: long texts wait for each other and not for the event loop.
        self._encoder = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._num_choices = 0
        self._num_requests = 0
        self._is_draining = False
        self._emptied = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether a request that comes now would be run."""
        return self._fleet.is_serving and not self._is_draining

    def list_models(self) -> Sequence[Model]:
        """The models that can be asked for."""
        return list(self._fleet.models().values())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Runs one request. Closing the iterator frees everything it holds, at once.

        Yields:
            One Started, then chunks, then one Finished per choice.

        Raises:
            RequestError: before or in between; the choices that are not finished are given up.
        """
        self._metrics.count_request()
        try:
            async with contextlib.aclosing(self._generate(request)) as events:
                async for event in events:
                    yield event
        except Exception as error:
            self._metrics.count_error(error)
            raise

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        arrival_s = self._loop.time()
        validation.check_request(request, has_tokenizer=self._tokenizer is not None)
        num_choices = request.num_choices or 1
        self._admit(num_choices)
        try:
            accepted = await self._accept(request)
            changed = asyncio.Event()
            generations = [
                self._make_generation(accepted, index, changed) for index in range(num_choices)
            ]
            self._open(generations)
            try:
                yield Started(
                    request_id=accepted.request_id,
                    seed=accepted.seed,
                    num_prompt_tokens=len(accepted.prompt_token_ids),
                )
                follow = self._follow(generations, changed, arrival_s)
                async with contextlib.aclosing(follow) as events:
                    async for event in events:
                        yield event
            finally:
                for generation in generations:
                    self._coordinator.close(generation)
        finally:
            self._leave(num_choices)

    async def drain(self) -> None:
        """Turns new requests away and returns when those that run are done."""
        self._is_draining = True
        while self._num_requests:
            self._emptied.clear()
            await self._emptied.wait()

    def close(self) -> None:
        """Lets the encoder's thread go."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def check_idle(self) -> None:
        """Checks that no request is here and nothing is left of any.

        Raises:
            AssertionError: something is; it says what.
        """
        assert self._num_requests == 0, f"{self._num_requests} requests are here"
        assert self._num_choices == 0, f"{self._num_choices} choices are admitted"
        self._coordinator.check_idle()

    async def _follow(
        self, generations: Sequence[Generation], changed: asyncio.Event, arrival_s: float
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yields what the generations show, as they show it."""
        last_sent_s: dict[Generation, float] = {}
        unfinished = list(generations)
        while unfinished:
            await changed.wait()
            changed.clear()
            for generation in tuple(unfinished):
                # Asked before taking: while the chunk is written, more may come and end it.
                is_over = generation.is_over
                chunk = generation.take()
                if chunk is not None:
                    now_s = self._loop.time()
                    if generation in last_sent_s:
                        self._metrics.observe_next_token(now_s - last_sent_s[generation])
                    else:
                        self._metrics.observe_first_token(now_s - arrival_s)
                    last_sent_s[generation] = now_s
                    yield chunk
                if not is_over or (generation.error is None and generation.has_more):
                    continue
                if generation.error is not None:
                    raise generation.error
                self._metrics.observe_last_token(self._loop.time() - arrival_s)
                unfinished.remove(generation)
                yield Finished(
                    choice_index=generation.choice_index,
                    finish_reason=generation.finish_reason,
                    usage=generation.usage(),
                )

    async def _accept(self, request: GenerateRequest) -> AcceptedRequest:
        models = self._fleet.models()
        if not models:
            raise self._shed("no_verifier", no_verifier())
        model = validation.find_model(request.model_id, models)
        return validation.accept(
            request,
            prompt_token_ids=await self._encode(request),
            model=model,
            defaults=self._defaults,
        )

    async def _encode(self, request: GenerateRequest) -> Sequence[int]:
        if request.text is None:
            assert request.prompt_token_ids is not None, "checked"
            return request.prompt_token_ids
        assert self._tokenizer is not None, "checked"
        if len(request.text) <= _ENCODE_INLINE_CHARACTERS:
            return self._tokenizer.encode(request.text)
        return await self._loop.run_in_executor(self._encoder, self._tokenizer.encode, request.text)

    def _make_generation(
        self, request: AcceptedRequest, choice_index: int, changed: asyncio.Event
    ) -> Generation:
        output_text = OutputText(
            None if self._tokenizer is None else self._tokenizer.detokenizer(),
            request.stop_sequences,
        )
        # Text goes on where it was: what the given output leaves incomplete or held back comes
        # with the first chunk, as it would have if the stream had not been interrupted.
        output_text.feed(request.output_token_ids)
        if output_text.stopped:
            raise InvalidRequestError(
                "the output already holds a stop sequence", field="output_token_ids"
            )
        return Generation(
            request=request,
            sequence_id=secrets.token_hex(16),
            choice_index=choice_index,
            seed=seed_of_choice(request.seed, choice_index),
            output_text=output_text,
            changed=changed,
        )

    def _open(self, generations: Sequence[Generation]) -> None:
        try:
            self._coordinator.open(generations)
        except UnavailableError as error:
            raise self._shed("no_verifier", error) from None

    def _admit(self, num_choices: int) -> None:
        if self._is_draining:
            raise self._shed(
                "draining",
                UnavailableError("the server is shutting down", retry_after_ms=RETRY_AFTER_MS),
            )
        most = self._max_concurrent_requests
        if self._num_choices + num_choices > most:
            raise self._shed(
                "concurrency",
                OverloadedError(
                    f"{self._num_choices} of at most {most} choices are being generated",
                    retry_after_ms=RETRY_AFTER_MS,
                ),
            )
        self._num_choices += num_choices
        self._num_requests += 1

    def _leave(self, num_choices: int) -> None:
        self._num_choices -= num_choices
        self._num_requests -= 1
        if self._num_requests == 0:
            self._emptied.set()

    def _shed(self, reason: str, error: RequestError) -> RequestError:
        self._metrics.count_shed(reason)
        return error
