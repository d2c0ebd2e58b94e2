"""Sampled distribution (docs/acceptance.md): tokens follow the target's distribution.

The target model is a stand-in with one fixed distribution over a small vocabulary. Everything else,
from the session over gRPC to the sampler, is the real verifier. The client supplies the drafts.
"""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import verifier.sampling.rejection_sampler
from servicekit.logs import get_logger
from tandem.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc
from tests.integration.scripted_model import FixedLawModel
from tests.integration.stack import LOOPBACK, MODEL
from verifier.build import LoadedModel
from verifier.config import VerifierConfig
from verifier.sampling.rejection_sampler import BoolArray, IntArray, accept_rows
from verifier.server import VerifierServer
from verifier.service.served_model import ServedModel

PROBS = np.array([0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02])
NUM_SEQUENCES, MAX_TOKENS_EACH, NUM_DRAFTS = 48, 900, 3
# Tokens of each sequence, and the bias towards the draft that so many tokens reveal.
VOLUMES = [
    pytest.param((300, 0.04), id="some"),
    pytest.param((MAX_TOKENS_EACH, 0.02), id="many", marks=pytest.mark.long),
]
# Upper 1e-4 point of chi-square with 6 degrees of freedom (Abramowitz and Stegun 26.8). The seeds
# are fixed, so a correct sampler passes always or never.
CRITICAL_VALUE = 27.86

Drafter = Callable[[random.Random], list[int]]
DRAFTERS: dict[str, Drafter] = {
    "likely": lambda r: [0] * NUM_DRAFTS,
    "unlikely": lambda r: [6] * NUM_DRAFTS,
    "mixed": lambda r: [r.randrange(len(PROBS)) for _ in range(NUM_DRAFTS)],
    "out of range": lambda r: [r.choice((0, len(PROBS), 2**32 - 1)) for _ in range(NUM_DRAFTS)],
}


def load_fixed_distribution(config: VerifierConfig) -> LoadedModel:
    served = ServedModel(
        model_id="fixed",
        model_digest="fixed",
        numerics_digest="fixed",
        instance_id="fixed",
        architecture="FixedDistribution",
        dtype="float32",
        device="cpu",
        numerics="fast",
        attention_backend="none",
        max_model_len=MAX_TOKENS_EACH + 8,
        max_num_seqs=NUM_SEQUENCES,
        max_num_batched_tokens=512,
        max_num_speculative_tokens=7,
        vocab_size=len(PROBS),
        block_size=16,
        num_kv_blocks=NUM_SEQUENCES * (MAX_TOKENS_EACH // 16 + 2),
        eos_token_ids=frozenset(),
    )
    model = FixedLawModel(np.log(PROBS).astype(np.float32))
    return LoadedModel(model=model, served=served)


@pytest.fixture
async def stub() -> AsyncIterator[verifier_pb2_grpc.VerifierServiceAsyncStub]:
    server = VerifierServer(
        VerifierConfig(server=LOOPBACK, model=MODEL),
        registry=CollectorRegistry(),
        logger=get_logger("test"),
    )
    engine = await server.start(load_fixed_distribution)
    async with grpc.aio.insecure_channel(server.server.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)
    await server.server.stop(0)
    engine.stop()
    await asyncio.wrap_future(engine.stopped)


async def sample(
    stub: verifier_pb2_grpc.VerifierServiceAsyncStub, draft: Drafter, tokens_each: int
) -> tuple[np.ndarray, int]:
    """Returns how often each token was sampled, over all sequences, and the drafts accepted."""
    choice = random.Random(7)
    call = stub.Session()
    hello = verifier_pb2.Hello(protocol_version=1, gateway_id="test")
    opens = [
        verifier_pb2.Open(
            sequence_id=f"s{index}",
            token_ids=[0],
            max_new_tokens=tokens_each,
            draft_wait=verifier_pb2.DRAFT_WAIT_ALWAYS,
            num_speculative_tokens=NUM_DRAFTS,
            sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=1000 + index),
        )
        for index in range(NUM_SEQUENCES)
    ]
    commands = [verifier_pb2.Command(hello=hello)]
    commands += [verifier_pb2.Command(open=message) for message in opens]
    await call.write(verifier_pb2.SessionRequest(commands=commands))
    counts: collections.Counter[int] = collections.Counter()
    num_accepted, num_open = 0, NUM_SEQUENCES
    while num_open:
        response = await call.read()
        assert isinstance(response, verifier_pb2.SessionResponse)
        drafts = []
        for event in response.events:
            assert not event.HasField("rejected")
            if not event.HasField("decided"):
                continue
            decided = event.decided
            counts.update(decided.token_ids)
            num_accepted += decided.num_accepted_tokens
            if decided.finish_reason:
                num_open -= 1
                continue
            hint = verifier_pb2.Draft(
                sequence_id=decided.sequence_id,
                base_length=decided.base_length + len(decided.token_ids),
                token_ids=draft(choice),
            )
            drafts.append(verifier_pb2.Command(draft=hint))
        if drafts:
            await call.write(verifier_pb2.SessionRequest(commands=drafts))
    call.cancel()
    assert sum(counts.values()) == NUM_SEQUENCES * tokens_each
    return np.array([counts[token_id] for token_id in range(len(PROBS))]), num_accepted


def chi_square(counts: np.ndarray) -> float:
    expected = PROBS * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("volume", VOLUMES)
async def test_the_sampled_distribution_is_the_targets_whatever_is_drafted(
    kind: str, volume: tuple[int, float], stub: verifier_pb2_grpc.VerifierServiceAsyncStub
) -> None:
    counts, num_accepted = await sample(stub, DRAFTERS[kind], tokens_each=volume[0])
    assert num_accepted > 0
    assert chi_square(counts) < CRITICAL_VALUE


@pytest.mark.parametrize("volume", VOLUMES)
async def test_a_bias_of_a_few_percent_towards_the_draft_is_detected(
    volume: tuple[int, float],
    stub: verifier_pb2_grpc.VerifierServiceAsyncStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens_each, bias = volume
    honest = accept_rows
    chance = np.random.default_rng(0)

    def biased(
        sampled: IntArray, drafts: IntArray, num_drafts: IntArray, is_usable: BoolArray
    ) -> tuple[IntArray, IntArray, BoolArray]:
        is_bonus = np.zeros(len(sampled), dtype=np.bool_)
        is_bonus[np.cumsum(num_drafts + 1) - 1] = True
        rows = np.flatnonzero(~is_bonus)
        is_swayed = chance.random(len(rows)) < bias
        sampled = sampled.copy()
        sampled[rows[is_swayed]] = drafts[is_swayed]
        return honest(sampled, drafts, num_drafts, is_usable)

    monkeypatch.setattr(verifier.sampling.rejection_sampler, "accept_rows", biased)
    counts, _ = await sample(stub, DRAFTERS["unlikely"], tokens_each)
    assert chi_square(counts) > CRITICAL_VALUE
