"""Two models with tokenizers of their own behind one gateway."""

import asyncio
import contextlib
import hashlib
from pathlib import Path

import pytest
import structlog
import tokenizers
import torch
from prometheus_client import CollectorRegistry
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from tandem.client import AsyncTandemClient, GenerationRequest
from tests.integration.stack import LOOPBACK, MODEL, verifier_config, wait_until
from verifier.build import load_model
from verifier.engine.engine import Engine
from verifier.server import VerifierServer

WORDS = [f"word{index}" for index in range(64)]


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """A model of random weights, with a tokenizer of whole words."""
    folder = tmp_path / "small"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


async def stop(engine: Engine) -> None:
    engine.stop()
    await asyncio.wrap_future(engine.stopped)


async def test_each_model_gets_and_gives_the_text_of_its_own_tokenizer(small_folder: Path) -> None:
    logger = structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()])
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for folder in (MODEL, small_folder):
            verifier = VerifierServer(
                verifier_config(model=folder, num_kv_blocks=64),
                registry=CollectorRegistry(),
                logger=logger,
            )
            stack.push_async_callback(verifier.server.stop, 0)
            engine = await verifier.start(load_model, None)
            stack.push_async_callback(stop, engine)
            addresses.append(verifier.server.address)
        config = GatewayConfig(
            server=LOOPBACK,
            http_listen=None,
            verifiers=addresses,
            tokenizer=[small_folder, MODEL],
        )
        gateway = GatewayServer(config, registry=CollectorRegistry(), logger=logger)
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        await wait_until(lambda: len(gateway.fleet.models()) == 2)
        found = {name: each.tokenizer_digest for name, each in gateway.fleet.models().items()}
        assert found == {
            folder.name: hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
            for folder in (MODEL, small_folder)
        }
        client = await stack.enter_async_context(
            AsyncTandemClient(gateway.server.address, retry=None)
        )
        for folder, prompt in ((MODEL, "import os"), (small_folder, "word5 word9")):
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            [choice] = (
                await client.generate(
                    GenerationRequest(
                        model_id=folder.name, prompt=prompt, max_new_tokens=8, ignore_eos=True
                    )
                )
            ).choices
            assert len(choice.token_ids) == 8
            assert choice.text.strip() == tokenizer.decode(choice.token_ids).strip()
            assert choice.text
