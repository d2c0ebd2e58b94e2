"""A pool is at every drafter of its model: each verifier drafts from it at its own one."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from drafter.config import DrafterConfig
from drafter.server import DrafterServer
from gateway.config import GatewayConfig
from gateway.routing.router import affinity_of, choose_verifier
from gateway.server import GatewayServer
from servicekit.config import ServerOptions
from tandem.client import AsyncTandemClient, Chunk, GenerationRequest, SpeculationParams
from tandem.client import Generation as Answer
from tests.gateway.running_gateway import sum_of_samples
from tests.integration.prompts import PLAIN, rename_prompts
from tests.integration.stack import EVERY_DRAFT, LOOPBACK, MODEL, verifier_config, wait_until
from verifier.build import load_model
from verifier.engine.engine import Engine
from verifier.server import VerifierServer

# Of each pair of a verifier and a drafter: the verifier prefers the one on its host.
HOSTS = ("127.0.0.2", "127.0.0.3")
TENANTS = ("a", "b")


@dataclasses.dataclass(slots=True, kw_only=True)
class Pairs:
    """A verifier and a drafter on each host, behind one gateway."""

    drafters: list[DrafterServer]
    verifiers: list[VerifierServer]
    engines: list[Engine]
    gateway: GatewayServer
    registry: CollectorRegistry
    client: AsyncTandemClient

    async def generate(
        self,
        index: int,
        prompt: list[int],
        client: AsyncTandemClient | None = None,
        **fields: Any,
    ) -> Answer:
        """A request at one of the verifiers."""
        request = self.request(index, prompt, **fields)
        return await (client or self.client).generate(request)

    def request(self, index: int, prompt: list[int], **fields: Any) -> GenerationRequest:
        loads = dict.fromkeys((each.server.address for each in self.verifiers), 0)
        address = self.verifiers[index].server.address
        key = next(
            key
            for key in map(str, range(1000))
            if choose_verifier(affinity_of(key, ()), loads, 1) == address
        )
        speculation = SpeculationParams(pool="p")
        request = GenerationRequest(
            prompt=prompt, max_new_tokens=40, ignore_eos=True, speculation=speculation
        )
        return dataclasses.replace(request, affinity_key=key, **fields)

    async def settle(self, num_texts: int) -> None:
        """Waits until each drafter's pools have so many texts, indexed."""
        await wait_until(
            lambda: all(each.pools.num_texts == num_texts for each in self.drafters),
            or_show=lambda: [each.pools.num_texts for each in self.drafters],
        )
        await self.gateway.pool_copies.settle()
        for each in self.drafters:
            await each.pool_keeper.settle()

    def texts(self, index: int) -> list[list[int]]:
        """What a drafter's pools have."""
        pools = self.drafters[index].pools
        return sorted(
            text.token_ids.tolist() for pool in pools.pool_ids() for text in pools.texts_of(pool)
        )

    def num_copies(self, outcome: str) -> float:
        return sum_of_samples(self.registry, "tandem_pool_copies_total", {"outcome": outcome})

    def num_drafters_in_use(self) -> list[int]:
        """By each verifier."""
        return [sum(engine.load.num_drafters.values()) for engine in self.engines]


@contextlib.asynccontextmanager
async def running_pairs(clients: Path | None = None) -> AsyncIterator[Pairs]:
    logger = structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()])
    async with contextlib.AsyncExitStack() as exits:
        drafters, verifiers, engines = [], [], []
        for host in HOSTS:
            drafter = DrafterServer(
                DrafterConfig(server=ServerOptions(listen=f"{host}:0")),
                registry=CollectorRegistry(),
                logger=logger,
            )
            exits.push_async_callback(drafter.server.stop, 0)
            await drafter.start()
            drafters.append(drafter)
        addresses = [each.server.address for each in drafters]
        for host in HOSTS:
            options = ServerOptions(listen=f"{host}:0")
            verifier = VerifierServer(
                verifier_config(server=options, drafters=addresses),
                registry=CollectorRegistry(),
                logger=logger,
            )
            exits.push_async_callback(verifier.server.stop, 0)
            engine = await verifier.start(load_model, None)
            exits.callback(engine.stop)
            verifiers.append(verifier)
            engines.append(engine)
        registry = CollectorRegistry()
        gateway = GatewayServer(
            GatewayConfig.model_validate(
                {
                    "server": LOOPBACK,
                    "tokenizer": MODEL,
                    "drafters": addresses,
                    "verifiers": [each.server.address for each in verifiers],
                    "clients": clients,
                    **EVERY_DRAFT,
                }
            ),
            registry=registry,
            logger=logger,
        )
        exits.push_async_callback(gateway.stop)
        await gateway.start()
        await wait_until(lambda: all(each.welcome for each in gateway.fleet.verifiers))
        token = None if clients is None else TENANTS[0]
        client = await exits.enter_async_context(
            AsyncTandemClient(gateway.server.address, token=token, retry=None)
        )
        yield Pairs(
            drafters=drafters,
            verifiers=verifiers,
            engines=engines,
            gateway=gateway,
            registry=registry,
            client=client,
        )


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return rename_prompts(1, seed=3)[0][:12]


async def test_verifiers_draft_from_what_others_wrote_each_at_its_own_drafter(
    prompt: list[int],
) -> None:
    async with running_pairs() as pairs:
        plain = await pairs.generate(1, prompt, speculation=PLAIN)
        first = await pairs.generate(0, prompt)
        await pairs.settle(1)
        second = await pairs.generate(1, prompt)
        await pairs.settle(2)
        assert second.usage.num_pool_drafts > first.usage.num_pool_drafts
        assert first.token_ids == second.token_ids == plain.token_ids
        # However many pools there are, each verifier's step sends one message.
        pools = [SpeculationParams(pool=f"p{number}") for number in range(8)]
        await asyncio.gather(
            *(pairs.generate(index, prompt, speculation=pool) for pool in pools for index in (0, 1))
        )
        assert pairs.num_drafters_in_use() == [1, 1]
        await pairs.settle(18)
        assert pairs.num_copies("sent") == 18
        assert pairs.num_copies("failed") == pairs.num_copies("dropped") == 0


@pytest.mark.parametrize(
    ("keep", "stop_sequences", "is_kept"),
    [
        ("output", (), True),
        ("all", (), True),
        ("nothing", (), False),
        ("output", (":",), True),
        ("all", (":",), True),
    ],
)
async def test_both_drafters_keep_the_same_of_a_text(
    prompt: list[int], keep: str, stop_sequences: tuple[str, ...], is_kept: bool
) -> None:
    async with running_pairs() as pairs:
        speculation = SpeculationParams(pool="p", pool_keep=keep)  # type: ignore[arg-type]
        answer = await pairs.generate(
            0, prompt, speculation=speculation, stop_sequences=stop_sequences
        )
        assert (len(answer.token_ids) < 40) == bool(stop_sequences)
        await pairs.settle(is_kept)
        text = [*prompt, *answer.token_ids] if keep == "all" else list(answer.token_ids)
        assert pairs.texts(0) == pairs.texts(1) == [text] * is_kept


@pytest.mark.parametrize("is_kept", [False, True])
async def test_of_a_cancelled_text_both_keep_what_was_shown_or_nothing(
    prompt: list[int], is_kept: bool
) -> None:
    async with running_pairs() as pairs:
        speculation = SpeculationParams(pool="p", pool_keep_cancelled=is_kept)
        request = pairs.request(0, prompt, speculation=speculation, max_new_tokens=900)
        async with contextlib.aclosing(pairs.client.stream(request)) as events:
            num_tokens = 0
            async for event in events:
                num_tokens += len(event.token_ids) if isinstance(event, Chunk) else 0
                if num_tokens > 8:
                    break
        await wait_until(lambda: _is_idle(pairs.gateway))
        await pairs.settle(is_kept)
        assert pairs.texts(0) == pairs.texts(1)


async def test_another_tenant_drafts_from_no_copy(tmp_path: Path, prompt: list[int]) -> None:
    clients = tmp_path / "clients.yaml"
    tenants = {
        each: {"clients": [{"token_sha256": hashlib.sha256(each.encode()).hexdigest()}]}
        for each in TENANTS
    }
    clients.write_text(json.dumps({"tenants": tenants}))
    async with running_pairs(clients) as pairs:
        await pairs.generate(0, prompt)
        await pairs.settle(1)
        address = pairs.gateway.server.address
        async with AsyncTandemClient(address, token=TENANTS[1]) as other:
            foreign = await pairs.generate(1, prompt, client=other)
            await pairs.settle(2)
            before = await pairs.generate(1, prompt)
        assert foreign.usage.num_pool_drafts == 0
        assert before.usage.num_pool_drafts > 0
        for drafter in pairs.drafters:
            assert set(drafter.pools.pool_ids()) == {"1:a/p", "1:b/p"}


@pytest.mark.parametrize("writer", [0, 1])
async def test_when_a_drafter_is_gone_its_pools_are_drafted_from_at_the_other(
    prompt: list[int], writer: int
) -> None:
    """It does not matter where the text was written: at the drafter that is gone or not."""
    async with running_pairs() as pairs:
        first = await pairs.generate(writer, prompt)
        await pairs.settle(1)
        # So both verifiers use their drafters, and report that one of them is gone.
        await pairs.generate(1 - writer, prompt, speculation=SpeculationParams())
        await pairs.drafters[0].server.stop(0)
        lost, kept = (each.server.address for each in pairs.drafters)
        of_model = {verifier.model_id for verifier in pairs.gateway.frontend.models.list()}
        [model_id] = of_model
        await wait_until(lambda: pairs.gateway.fleet.drafters_of(model_id) == {kept})
        again = await pairs.generate(0, prompt)
        assert again.usage.num_pool_drafts > 0
        assert again.token_ids == first.token_ids
        # Nothing is sent to the one that is gone.
        await wait_until(lambda: pairs.drafters[1].pools.num_texts == 2)
        await pairs.gateway.pool_copies.settle()
        assert pairs.num_copies("failed") == 0, lost


async def test_a_text_is_loaded_at_both(prompt: list[int]) -> None:
    async with running_pairs() as pairs:
        num_tokens = await pairs.client.load_pool("docs", "def mean(values): return values")
        await pairs.settle(1)
        assert pairs.texts(0) == pairs.texts(1)
        assert len(pairs.texts(0)[0]) == num_tokens


def _is_idle(gateway: GatewayServer) -> bool:
    try:
        gateway.frontend.check_idle()
    except AssertionError:
        return False
    return True
