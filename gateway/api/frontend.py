"""One request from its admission to its last Finished.

Owns the making of a request's generations and the reading of what they show. Knows no
transport: gRPC and HTTP are adapters around `Frontend.generate`, and close it when their client
goes away.
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence

from gateway.coordinator import Coordinator
from gateway.errors import InvalidRequestError, UnavailableError
from gateway.generation.generation import Generation
from gateway.messages.request import AcceptedRequest, GenerateRequest
from gateway.messages.response import Finished, GenerateEvent, Model, Started, Traced
from gateway.metrics import GatewayMetrics
from gateway.requests import acceptance, validation
from gateway.requests.acceptance import RequestDefaults
from gateway.requests.admission import Admission, AdmittedRequest
from gateway.requests.seeds import seed_of_choice
from gateway.routing.fleet import Fleet, no_verifier
from gateway.text.output_text import OutputText
from gateway.text.tokenizer import CONTEXT_TOKENS, Tokenizer, TooManyTokensError
from gateway.text.tokenizer_threads import TokenizerThreads
from servicekit.logs import Logger, adopt_request_id

# About as much text as a token stands for.
_CHARACTERS_PER_TOKEN = 4


class Frontend:
    """The core behind every door; on the event loop."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        fleet: Fleet,
        tokenizer: Tokenizer | None,
        defaults: RequestDefaults,
        allow_trace: bool,
        max_concurrent_requests: int,
        max_waiting_tokens: int,
        metrics: GatewayMetrics,
        logger: Logger,
    ) -> None:
        """Begins open.

        Args:
            coordinator: runs what is accepted.
            fleet: says which models there are.
            tokenizer: None: token ids in, token ids out.
            defaults: what requests leave open.
            allow_trace: whether they may ask to be told of every step.
            max_concurrent_requests, max_waiting_tokens: see `Admission`.
            metrics: the gateway's.
            logger: the gateway's.
        """
        self._coordinator = coordinator
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._allow_trace = allow_trace
        self._metrics = metrics
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._threads = TokenizerThreads()
        self._admission = Admission(
            max_choices=max_concurrent_requests,
            max_waiting_tokens=max_waiting_tokens,
            on_shed=metrics.count_shed,
        )

    @property
    def is_serving(self) -> bool:
        """Whether a request that comes now would be run."""
        return self._fleet.is_serving and not self._admission.is_draining

    def list_models(self) -> Sequence[Model]:
        """The models that can be asked for."""
        return list(self._fleet.models().values())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Runs one request. Closing the iterator frees everything it holds, at once.

        Yields:
            One Started, then chunks, each after what was traced of its steps, then one Finished
            per choice.

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
        validation.check_request(
            request, has_tokenizer=self._tokenizer is not None, allow_trace=self._allow_trace
        )
        # From here on, every log line of the call has the id that the client hears of.
        request = dataclasses.replace(request, request_id=adopt_request_id(request.request_id))
        num_choices = request.num_choices or 1
        admitted = self._admission.admit(num_choices)
        try:
            accepted = await self._accept(request, admitted)
            output_text = await self._read_output(accepted)
            changed = asyncio.Event()
            generations: list[Generation] = []
            for index in range(num_choices):
                generations.append(
                    Generation(
                        request=accepted,
                        sequence_id=secrets.token_hex(16),
                        choice_index=index,
                        seed=seed_of_choice(accepted.seed, index),
                        output_text=output_text.copy(),
                        changed=changed,
                    )
                )
                if index > 0:
                    # Each copies the prompt: of a long one, many at once would hold up the loop.
                    await asyncio.sleep(0)
            self._open(generations)
            self._logger.info(
                "request_opened",
                request_id=accepted.request_id,
                sequence_ids=[generation.sequence_id for generation in generations],
            )
            try:
                yield Started(
                    request_id=accepted.request_id,
                    seed=accepted.seed,
                    num_prompt_tokens=len(accepted.prompt_token_ids),
                )
                follow = self._follow(generations, changed, arrival_s, admitted)
                async with contextlib.aclosing(follow) as events:
                    async for event in events:
                        yield event
            finally:
                for generation in generations:
                    self._coordinator.close(generation)
        finally:
            admitted.leave()

    async def drain(self) -> None:
        """Turns new requests away and returns when those that run are done."""
        await self._admission.drain()

    def close(self) -> None:
        """Lets the tokenizer's threads go."""
        self._threads.close()

    def check_idle(self) -> None:
        """Checks that no request is here and nothing is left of any.

        Raises:
            AssertionError: something is; it says what.
        """
        self._admission.check_idle()
        self._coordinator.check_idle()

    async def _follow(
        self,
        generations: Sequence[Generation],
        changed: asyncio.Event,
        arrival_s: float,
        admitted: AdmittedRequest,
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
                shown = generation.read()
                if isinstance(shown, Traced):
                    yield shown
                elif shown is not None:
                    now_s = self._loop.time()
                    if generation in last_sent_s:
                        self._metrics.observe_next_token(now_s - last_sent_s[generation])
                    else:
                        self._metrics.observe_first_token(now_s - arrival_s)
                        admitted.begin_choice()
                    last_sent_s[generation] = now_s
                    yield shown
                if not is_over or generation.has_unread:
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

    async def _accept(self, request: GenerateRequest, admitted: AdmittedRequest) -> AcceptedRequest:
        models = self._fleet.models()
        if not models:
            self._metrics.count_shed("no_verifier")
            raise no_verifier()
        model = acceptance.find_model(request.model_id, models)
        acceptance.check_tokenizer(request, model=model, defaults=self._defaults)
        num_given = len(request.output_token_ids)
        if request.text is not None:
            # While it waits for the tokenizer, about so many.
            admitted.wait_with(len(request.text) // _CHARACTERS_PER_TOKEN + num_given)
        prompt_token_ids = await self._encode(request, model)
        accepted = acceptance.accept(
            request, prompt_token_ids=prompt_token_ids, model=model, defaults=self._defaults
        )
        admitted.wait_with(len(prompt_token_ids) + num_given)
        return accepted

    async def _encode(self, request: GenerateRequest, model: Model) -> Sequence[int]:
        if request.text is None:
            assert request.prompt_token_ids is not None, "checked"
            return request.prompt_token_ids
        tokenizer = self._tokenizer
        assert tokenizer is not None, "checked"
        max_tokens = acceptance.max_prompt_tokens(model, self._defaults)
        # Refused unread where it can only be too long.
        num_bytes, max_bytes = len(request.text.encode()), tokenizer.max_bytes(max_tokens)
        if max_bytes is not None and num_bytes > max_bytes:
            raise InvalidRequestError(
                f"a text of {num_bytes} bytes has more than the {max_tokens} tokens that a prompt "
                "may have",
                field="text",
            )
        try:
            return await self._threads.run(
                num_bytes, tokenizer.encode, request.text, max_tokens=max_tokens
            )
        except TooManyTokensError as error:
            raise acceptance.prompt_too_long(
                error.num_tokens, model, self._defaults, "text"
            ) from None

    async def _read_output(self, request: AcceptedRequest) -> OutputText:
        """The text of an output that begins with what the client already has; of every choice.

        Text goes on where it was: what the given output leaves incomplete or held back comes with
        the first chunk, as it would have if the stream had not been interrupted.
        """
        if self._tokenizer is None or not request.has_text:
            return OutputText(None, ())
        prompt, given = request.prompt_token_ids, request.output_token_ids
        if not request.stop_sequences:
            # Where text goes on is known from the last tokens alone.
            last = [*prompt[-CONTEXT_TOKENS:], *given[-CONTEXT_TOKENS:]]
            return OutputText(self._tokenizer.detokenizer(last), ())
        output_text = OutputText(self._tokenizer.detokenizer(prompt), request.stop_sequences)
        await self._threads.run(len(given) * _CHARACTERS_PER_TOKEN, output_text.skip, given)
        if output_text.stopped:
            raise InvalidRequestError(
                "the output already holds a stop sequence", field="output_token_ids"
            )
        return output_text

    def _open(self, generations: Sequence[Generation]) -> None:
        try:
            self._coordinator.open(generations)
        except UnavailableError:
            self._metrics.count_shed("no_verifier")
            raise
