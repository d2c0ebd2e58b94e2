"""One request from its admission to its last Finished.

Owns how a request's generations are made and their output is read. Knows no transport: gRPC and
HTTP are adapters around `Frontend.generate`, and close it when their client goes away.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gateway.api.output_events import read_output
from gateway.api.request_record import OK, RequestRecord
from gateway.api.request_texts import RequestTexts, estimate_held_tokens
from gateway.api.served_models import ServedModels
from gateway.api.turns import ClientGoneError, Turns
from gateway.coordinator import Coordinator
from gateway.errors import (
    RETRY_AFTER_MS,
    InvalidRequestError,
    UnavailableError,
    code_name,
    shutting_down,
)
from gateway.generation.generation import Generation
from gateway.messages.request import AcceptedRequest, GenerateRequest
from gateway.messages.response import GenerateEvent, Model, Started
from gateway.metrics import GatewayMetrics
from gateway.peers.pool_feeder import PoolFeeder
from gateway.requests import acceptance, validation
from gateway.requests.acceptance import RequestDefaults
from gateway.requests.admission import Admission, AdmittedRequest
from gateway.requests.principal import ANONYMOUS, Principal
from gateway.requests.seeds import seed_of_choice
from gateway.routing.aliases import Aliases
from gateway.routing.fleet import Fleet
from gateway.routing.opening import new_sequence_id
from gateway.text.model_text import ModelText, ModelTexts
from gateway.text.tokenizer_threads import TokenizerThreads
from servicekit.logs import Logger, adopt_request_id
from servicekit.serving.client_waits import is_left_unread

if TYPE_CHECKING:
    from servicekit.telemetry.spans import Spans


class Frontend:
    """The core behind every API; on the event loop.

    Attributes:
        turns: in which requests begin, those of every API.
        models: those that are served.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        fleet: Fleet,
        aliases: Aliases,
        texts: ModelTexts,
        threads: TokenizerThreads,
        pools: PoolFeeder,
        defaults: RequestDefaults,
        allow_trace: bool,
        max_concurrent_requests: int,
        max_waiting_tokens: int,
        metrics: GatewayMetrics,
        logger: Logger,
        spans: "Spans | None",
    ) -> None:
        """Begins open.

        Args:
            aliases: names of several models.
            texts: the tokenizers and chat templates of the models.
            threads: for long texts.
            pools: feeds texts that are loaded.
            defaults: values that requests leave open.
            allow_trace: whether requests may ask for a trace of every step.
            max_concurrent_requests, max_waiting_tokens: see `Admission`.
            spans: records the requests; None: nothing does.
        """
        self._coordinator = coordinator
        self._fleet = fleet
        self._texts = texts
        self._pools = pools
        self._defaults = defaults
        self._allow_trace = allow_trace
        self._metrics = metrics
        self._logger = logger
        self._spans = spans
        self._loop = asyncio.get_running_loop()
        self.turns = Turns()
        self.models = ServedModels(
            fleet=fleet, aliases=aliases, texts=texts, allow_trace=allow_trace, metrics=metrics
        )
        self._request_texts = RequestTexts(threads, defaults)
        self._admission = Admission(
            max_choices=max_concurrent_requests,
            max_waiting_tokens=max_waiting_tokens,
            on_shed=metrics.count_shed,
            clock=self._loop.time,
        )
        metrics.watch_admission(self._admission)

    @property
    def is_serving(self) -> bool:
        """Whether a request that comes now would be run."""
        return self._fleet.is_serving and not self._admission.is_draining

    def count_refused(self, code: str, principal: Principal = ANONYMOUS) -> None:
        """Counts a request that was refused before it could be run, and logs its line.

        Args:
            code: gRPC's name of its code, one of `gateway.errors.ERROR_CODES`.
            principal: who made it.
        """
        self._metrics.count_request()
        self._metrics.count_code(code)
        record = RequestRecord(tenant=principal.tenant, spans=self._spans, logger=self._logger)
        record.end(code)

    def check_batch(self, num_choices: int, principal: Principal) -> None:
        """Refuses a list of prompts, which are requests of their own, that never fit all together.

        Args:
            num_choices: of all of them.

        Raises:
            InvalidRequestError: there are more than may be generated at a time.
        """
        self._admission.check_size(num_choices, principal, field="prompt")

    async def generate(
        self,
        request: GenerateRequest,
        principal: Principal = ANONYMOUS,
        *,
        expires_at_s: float = math.inf,
        is_gone: Callable[[], bool] = lambda: False,
        failure: Callable[[], str] = lambda: "",
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Runs one request. Closing the iterator frees everything it holds, at once.

        Args:
            principal: who makes it.
            expires_at_s: its deadline, by the event loop's clock. The transport closes the iterator
                then; from this time on, that counts as an expired deadline.
            is_gone: whether its client has gone, where the transport knows that before it closes
                the iterator.
            failure: asked where the transport closes the iterator. gRPC's name of the code, one of
                `gateway.errors.ERROR_CODES`, of an error that the transport itself answers with;
                "": there is none, such as where its client is gone.

        Yields:
            One Started, then chunks, each after the traces of its steps, then one Finished per
            choice.

        Raises:
            RequestError: before or in between; the choices that are not finished are dropped.
            ClientGoneError: the client was gone before the request was opened at a verifier.
        """
        self._metrics.count_request()
        record = RequestRecord(
            tenant=principal.tenant,
            spans=self._spans,
            logger=self._logger,
            operation="text_completion" if request.conversation is None else "chat",
        )
        try:
            events = self._generate(request, principal, expires_at_s, is_gone, record)
            # What is needed while it runs is in the accepted request.
            del request
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        except ClientGoneError:
            record.end("CANCELLED")
            raise
        except Exception as error:
            self._metrics.count_error(error)
            record.end(code_name(error))
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if is_left_unread():
                record.end("RESOURCE_EXHAUSTED")
            elif code := failure():
                self._metrics.count_code(code)
                record.end(code)
            else:
                is_late = self._loop.time() >= expires_at_s
                record.end("DEADLINE_EXCEEDED" if is_late else "CANCELLED")
            raise
        record.end(OK)

    async def _generate(
        self,
        request: GenerateRequest,
        principal: Principal,
        expires_at_s: float,
        is_gone: Callable[[], bool],
        record: RequestRecord,
    ) -> AsyncGenerator[GenerateEvent, None]:
        # From here on, every log line of the call has the id that the client gets.
        request = dataclasses.replace(request, request_id=adopt_request_id(request.request_id))
        request = acceptance.with_default_pool(request, self._defaults)
        validation.check_request(
            request, has_tokenizer=not self._texts.is_empty, allow_trace=self._allow_trace
        )
        principal.check_priority(request.priority)
        model = self.models.of_request(request)
        admitted = self._admission.admit(
            request.num_choices or 1,
            principal,
            model_id=model.model_id,
            has_other_models=self._fleet.has_several_models,
        )
        try:
            changed = asyncio.Event()
            with self._count_expiry(expires_at_s, ()):
                text = self.models.text_of(model)
                if text is None:
                    acceptance.check_has_no_text(request, model=model)
                # Before its turn: of several requests that are admitted at a time, none may be
                # refused after others have begun.
                num_tokens = estimate_held_tokens(request) + len(request.output_token_ids)
                admitted.wait_with(num_tokens)
                await self.turns.take(is_gone)
                accepted = await self._accept(
                    request, model, text, principal, admitted, record.trace_parent
                )
                del request
                generations = await self._make_generations(accepted, text, changed)
                # What is opened is computed, although its client may go: it must be here yet.
                await self.turns.take(is_gone)
            try:
                self._coordinator.open(generations)
            except UnavailableError:
                self._metrics.count_shed("no_verifier")
                raise
            try:
                record.opened(accepted, generations)
                self._logger.info(
                    "request_opened",
                    request_id=accepted.request_id,
                    sequence_ids=[generation.sequence_id for generation in generations],
                )
                with self._count_expiry(expires_at_s, generations):
                    yield Started(
                        request_id=accepted.request_id,
                        seed=accepted.seed,
                        model=model,
                        prompt_token_ids=accepted.prompt_token_ids,
                    )
                    output = read_output(
                        generations,
                        changed,
                        admitted,
                        record,
                        self._metrics.of_model(model.model_id),
                    )
                    async with contextlib.aclosing(output) as events:
                        async for event in events:
                            yield event
            finally:
                for generation in generations:
                    self._coordinator.close(generation)
        finally:
            admitted.leave()

    async def load_pool(self, request: GenerateRequest, principal: Principal) -> int:
        """Puts a request's text into its pool, without running it; returns the text's tokens.

        Raises:
            RequestError: the pool does not have the text.
        """
        if not (pool := request.speculation.pool):
            raise InvalidRequestError("names no pool", field="pool")
        validation.check_request(request, has_tokenizer=not self._texts.is_empty)
        model = self.models.of_request(request)
        text = self.models.text_of(model)
        if text is None:
            raise acceptance.no_tokenizer(model, "text")
        pool_id = acceptance.pool_id(principal.tenant, pool)
        drafters = self._fleet.drafters_of(model.model_id)
        if not drafters:
            raise UnavailableError("there is no drafter", retry_after_ms=RETRY_AFTER_MS)
        admitted = self._admission.admit(
            1,
            principal,
            model_id=model.model_id,
            has_other_models=self._fleet.has_several_models,
        )
        try:
            admitted.wait_with(estimate_held_tokens(request))
            await self.turns.take(lambda: False)
            token_ids = await self._request_texts.encode_text(request.text or "", text)
            await self._pools.load(drafters, pool_id, token_ids)
        finally:
            admitted.leave()
        return len(token_ids)

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones are done.

        Cancelled, it ends those that still run: their clients learn why.
        """
        try:
            await self._admission.drain()
        except asyncio.CancelledError:
            self._coordinator.fail_all(shutting_down())
            raise

    def check_idle(self) -> None:
        """Checks that no request is running and nothing is left of any.

        Raises:
            AssertionError: something is left; it names it.
        """
        self._admission.check_idle()
        self._coordinator.check_idle()

    @contextlib.contextmanager
    def _count_expiry(
        self, expires_at_s: float, generations: Sequence[Generation]
    ) -> Iterator[None]:
        """Counts the request if it is ended from outside after its deadline.

        Args:
            generations: those that were opened.
        """
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            if self._loop.time() >= expires_at_s:
                if any(each.has_started for each in generations):
                    phase = "decode"
                elif any(self._coordinator.is_running(each) for each in generations):
                    phase = "prefill"
                else:
                    phase = "queue"
                self._metrics.count_expired(phase)
            raise

    async def _accept(
        self,
        request: GenerateRequest,
        model: Model,
        text: ModelText | None,
        principal: Principal,
        admitted: AdmittedRequest,
        trace_parent: str,
    ) -> AcceptedRequest:
        prompt = await self._request_texts.encode_prompt(request, model, text)
        predicted_token_ids = await self._request_texts.encode_prediction(request, model, text)
        accepted = acceptance.accept(
            dataclasses.replace(request, sampling=prompt.sampling),
            prompt_token_ids=prompt.token_ids,
            model=model,
            defaults=self._defaults,
            predicted_token_ids=predicted_token_ids,
            reading=prompt.reading,
            tenant=principal.tenant,
            tenant_weight=principal.weight,
            trace_parent=trace_parent,
        )
        admitted.wait_with(accepted.num_held_tokens)
        return accepted

    async def _make_generations(
        self, request: AcceptedRequest, text: ModelText | None, changed: asyncio.Event
    ) -> Sequence[Generation]:
        output_text = await self._request_texts.begin_output(request, text)
        generations: list[Generation] = []
        for index in range(request.num_choices):
            generations.append(
                Generation(
                    request=request,
                    sequence_id=new_sequence_id(),
                    choice_index=index,
                    seed=seed_of_choice(request.seed, index),
                    output_text=output_text.copy(),
                    changed=changed,
                )
            )
            if index > 0:
                # Each copies the prompt: many long ones at once would block the event loop.
                await asyncio.sleep(0)
        return generations
