"""Puts load on a server: the variants take turns."""

import contextlib
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

from tandem.cli.benchmark.progress import progress
from tandem.cli.connection_flags import ConnectionFlags
from tandem.cli.tls_context import tls_context
from tandem.client import AsyncTandemClient
from tandem.load.answer import Answer, Summary
from tandem.load.endpoints import Endpoint, GrpcEndpoint, OpenAiEndpoint
from tandem.load.run import Amount, run_turn
from tandem.load.workloads import Prompt
from tandem.transport.channel import is_loopback_host, load_own_certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is sent."""

    prompts: list[Prompt]
    variants: Mapping[str, bool]
    """Whether it speculates, by name."""
    turns: list[Amount]
    concurrency: int
    rate_per_s: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where it is sent; `url` is None: to a gateway's gRPC."""

    url: str | None
    is_chat: bool
    model_id: str
    timeout_s: float


async def run(plan: Plan, connection: ConnectionFlags, server: Server) -> dict[str, Summary]:
    """Each variant's answers, by its name.

    Raises:
        TandemError, OSError, ValueError: the server cannot be used.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in plan.variants}
    durations_s = dict.fromkeys(plan.variants, 0.0)
    num_taken = dict.fromkeys(plan.variants, 0)

    def prompts(name: str) -> Iterator[Prompt]:
        while True:
            prompt = plan.prompts[num_taken[name] % len(plan.prompts)]
            num_taken[name] += 1
            yield prompt

    async with (
        # Also while it waits for the server's first answer.
        progress(_num_requests(plan)) as advance,
        _endpoint(connection, server) as endpoint,
    ):
        for index, amount in enumerate(plan.turns):
            # The variant that runs second finds prompts in the prefix cache: each runs second in
            # half of the turns. Both begin with the same prompt, however many the faster one sent
            # in the last turn.
            num_taken.update(dict.fromkeys(num_taken, max(num_taken.values())))
            variants = list(plan.variants.items())[:: -1 if index % 2 else 1]
            for name, speculates in variants:
                started_at_s = time.perf_counter()
                answers[name] += await run_turn(
                    endpoint,
                    prompts(name),
                    amount,
                    concurrency=plan.concurrency,
                    rate_per_s=plan.rate_per_s,
                    # Both variants get the same arrivals.
                    seed=plan.seed + index,
                    speculates=speculates,
                    on_answer=lambda _: advance(),
                )
                durations_s[name] += time.perf_counter() - started_at_s
    return {name: Summary(answers=answers[name], duration_s=durations_s[name]) for name in answers}


@contextlib.asynccontextmanager
async def _endpoint(connection: ConnectionFlags, server: Server) -> AsyncIterator[Endpoint]:
    """The server, which has answered a first call.

    Raises:
        TandemError, OSError: it did not.
        ValueError: the token is no token, or would cross a network in plaintext.
    """
    if server.url is None:
        client = AsyncTandemClient(
            connection.target,
            tls=connection.tls_options(),
            token=connection.token(),
            allow_plaintext_token=connection.allow_plaintext_token,
            retry=None,
        )
        async with client:
            served = await client.list_models(timeout_s=server.timeout_s)
            if not served:
                raise OSError(f"{connection.target}: serves no model")
            model_id = server.model_id or served[0].model_id
            yield GrpcEndpoint(client, model_id=model_id, timeout_s=server.timeout_s)
        return
    import openai

    tls = tls_context(connection.tls_ca)
    if connection.tls_cert is not None:
        load_own_certificate(tls, connection.tls_cert, connection.tls_key)
    token = connection.token_of_file()
    # As many connections as --concurrency or --rate need. The library's own type: which package it
    # is from depends on the version.
    no_limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=None, max_keepalive_connections=None
    )
    async with openai.AsyncOpenAI(
        base_url=server.url,
        # The client insists on one; a server without keys does not look at it.
        api_key=token or "none",
        timeout=server.timeout_s,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(
            verify=tls,
            limits=no_limits,
            # The environment's proxy would look for this machine's servers on its own.
            trust_env=not is_loopback_host(urllib.parse.urlsplit(server.url).hostname or ""),
        ),
    ) as openai_client:
        base_url = openai_client.base_url  # as the client understands the flag
        if (
            token is not None
            and base_url.scheme != "https"
            and not connection.allow_plaintext_token
            and not is_loopback_host(base_url.host)
        ):
            raise ValueError(
                f"the token would go to {base_url.host} in plaintext: use https, "
                "or allow it explicitly"
            )
        try:
            models = await openai_client.models.list()
        except openai.NotFoundError as error:
            raise OSError(f"{server.url}: has no /models; a base URL ends in /v1") from error
        except openai.OpenAIError as error:
            raise OSError(f"{server.url}: {error}") from error
        if not models.data:
            raise OSError(f"{server.url}: serves no model")
        yield OpenAiEndpoint(
            openai_client,
            model_id=server.model_id or models.data[0].id,
            timeout_s=server.timeout_s,
            is_chat=server.is_chat,
        )


def _num_requests(plan: Plan) -> int | None:
    """Of all variants and turns; None: as many as there is time for."""
    if any(amount.requests is None or amount.seconds is not None for amount in plan.turns):
        return None
    return len(plan.variants) * sum(amount.requests or 0 for amount in plan.turns)
