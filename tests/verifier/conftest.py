"""Fixtures of the verifier's tests: the bundled model, real servers."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, PreTrainedModel

from servicekit.channels.discovery import Resolve, resolve_host
from servicekit.config import ServerOptions
from tandem.v1 import verifier_pb2_grpc
from tests.verifier.opens import NUM_NEW_TOKENS, PROMPT
from tests.verifier.paged_model import PagedModel, load_bundled_model
from tests.verifier.running_engine import RunningEngine, StartEngine, start_engine_with
from tests.verifier.running_verifier import RunningVerifier, StartVerifier
from tests.verifier.saved_models import SaveModel
from tests.verifier.scoring_engine import StartScoring, started
from verifier.build import LoadedModel, load_model
from verifier.config import VerifierConfig
from verifier.engine.engine import Engine
from verifier.engine.observation import EngineObserver
from verifier.server import VerifierServer
from verifier.transformers_model.checkpoint import reference_logits

MODEL_FOLDER = Path(__file__).parents[2] / "examples/demo_model/model"


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Starts engines over a scripted model; checks at the end that they are idle and empty."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> RunningEngine:
            running = start_engine_with(**options)
            stack.callback(running.stop)
            return running

        yield start


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    """Writes a small random model to a folder, as transformers does."""

    def save(config: Any) -> Path:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def bundled_float32() -> PagedModel:
    return load_bundled_model(MODEL_FOLDER, torch.float32)


@pytest.fixture(scope="session")
def bundled_config() -> VerifierConfig:
    return VerifierConfig(
        server=ServerOptions(listen="127.0.0.1:0"),
        model=MODEL_FOLDER,
        model_id="renamer",
        device="cpu",
        dtype="float32",
        threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        num_kv_blocks=512,
        score="full",
    )


@pytest.fixture(scope="session")
def bundled_model(bundled_config: VerifierConfig) -> LoadedModel:
    """Loaded once; one engine at a time may use it."""
    return load_model(bundled_config)


@pytest.fixture
def start_scoring(
    bundled_config: VerifierConfig, bundled_model: LoadedModel
) -> Iterator[StartScoring]:
    """Starts an engine over the bundled model; options are those of `VerifierConfig`."""
    with contextlib.ExitStack() as stack:

        def start(**options: object) -> Engine:
            config = bundled_config.model_copy(update=options)
            return stack.enter_context(started(bundled_model, config))

        yield start


@pytest.fixture
async def start_verifier(
    bundled_config: VerifierConfig, bundled_model: LoadedModel
) -> AsyncIterator[StartVerifier]:
    """Starts a verifier with the bundled model; options are those of `VerifierConfig`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            *,
            max_model_len: int | None = None,
            gives_logprobs: bool = True,
            gives_full_scores: bool = True,
            observer: EngineObserver | None = None,
            resolve: Resolve = resolve_host,
            **options: object,
        ) -> RunningVerifier:
            config = bundled_config.model_copy(update=options)
            served = dataclasses.replace(bundled_model.served, allows_full_scores=gives_full_scores)
            if max_model_len is not None:
                served = dataclasses.replace(served, max_model_len=max_model_len)
            if not gives_logprobs:
                served = dataclasses.replace(served, max_logprobs=None)
            loaded = dataclasses.replace(bundled_model, served=served)
            registry, log = CollectorRegistry(), structlog.testing.LogCapture()
            logger = structlog.wrap_logger(
                None,
                processors=[log],
                wrapper_class=structlog.make_filtering_bound_logger("info"),
            )
            verifier = VerifierServer(config, registry=registry, logger=logger, resolve=resolve)
            stack.push_async_callback(verifier.server.stop, 0)
            engine = await verifier.start(lambda _: loaded, observer)
            channel = grpc.aio.insecure_channel(verifier.server.address)
            running = RunningVerifier(
                verifier=verifier,
                engine=engine,
                channel=channel,
                stub=verifier_pb2_grpc.VerifierServiceStub(channel),
                registry=registry,
                log=log.entries,
            )
            stack.push_async_callback(running.close)
            return running

        yield start


@pytest.fixture(scope="session")
def greedy_output(bundled_float32: PagedModel) -> list[int]:
    """Greedy output by transformers' own attention, recomputed for every token."""
    known = list(PROMPT)
    for _ in range(NUM_NEW_TOKENS):
        known.append(int(reference_logits(bundled_float32.model, known)[-1].argmax()))
    output = known[len(PROMPT) :]
    assert len(set(output)) > 3, "a text that says something about drafts"
    return output
