"""Texts through a whole gateway: where an output begins, and which texts wait for others."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gateway.text.model_text import ModelText
from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import MODEL_FOLDER, StartVerifier
from tests.gateway.running_gateway import RunningGateway, StartGateway, error_of
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

WORDS = ["<unk>", "\u2581the", "\u2581cat", "\u2581sat", "\u2581on"]
THE, CAT, SAT, ON = 1, 2, 3, 4


@pytest.fixture
def metaspace_folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer as SentencePiece models have."""
    model = models.BPE({word: index for index, word in enumerate(WORDS)}, [], unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("stop_sequences", [[], ["never"]])
async def test_the_first_word_of_an_output_keeps_its_space(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    metaspace_folder: Path,
    stop_sequences: list[str],
) -> None:
    running = await start_gateway(verifiers=[verifier.address], tokenizer=metaspace_folder)
    verifier.play(lambda opened: [SAT, ON, 0])
    output = await running.generate(THE, CAT, stop_sequences=stop_sequences)
    assert output.text == " sat on"
    # A client that resumes has the first word already.
    verifier.play(lambda opened: [ON, 0])
    output = await running.generate(
        THE, CAT, output_token_ids=[SAT], stop_sequences=stop_sequences, n=2
    )
    assert [output.of(choice).text for choice in range(2)] == [" on", " on"]


class GatedTokenizer(Tokenizer):
    """Delays texts of so many characters or more until the test lets them go."""

    def __init__(self, tokenizer: Tokenizer, first_gated: int) -> None:
        super().__init__(tokenizer._tokenizer)
        self.may_go_on = threading.Event()
        self.num_encoded = 0
        self._first_gated = first_gated

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        if len(text) >= self._first_gated:
            assert self.may_go_on.wait(60)
        self.num_encoded += 1
        return super().encode(text, max_tokens=max_tokens)


@contextlib.asynccontextmanager
async def gated(running: RunningGateway, first_gated: int) -> AsyncIterator[GatedTokenizer]:
    texts = running.gateway.frontend._texts
    found = texts.find("")
    assert found is not None
    tokenizer = GatedTokenizer(found.tokenizer, first_gated)
    texts._by_digest = {tokenizer.digest: ModelText(tokenizer=tokenizer)}
    try:
        yield tokenizer
    finally:
        tokenizer.may_go_on.set()


async def test_a_short_text_does_not_wait_for_a_long_one(
    start_gateway: StartGateway, start_verifier: StartVerifier
) -> None:
    verifier = await start_verifier(max_model_len=1 << 20)
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address], tokenizer=MODEL_FOLDER)
    async with gated(running, 300_000) as tokenizer:
        huge = asyncio.ensure_future(running.generate(text="x = 1\n" * 60_000))
        for num_characters in (100, 4_000, 50_000):
            output = await running.generate(text="x" * num_characters)
            assert output.token_ids == [5, 0]
        assert not huge.done()
        tokenizer.may_go_on.set()
        assert (await huge).token_ids == [5, 0]


async def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_encoded(
    start_gateway: StartGateway, verifier: ScriptedVerifier
) -> None:
    running = await start_gateway(verifiers=[verifier.address], tokenizer=MODEL_FOLDER)
    async with gated(running, 1 << 30) as tokenizer:
        error = await error_of(running.call(text="x" * (2_000_000)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = await error_of(running.call(text="x" * 1_000_000))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1000000 bytes" in (error.details() or "")
        assert tokenizer.num_encoded == 0
        # A text that might fit is encoded, and found too long then.
        error = await error_of(running.call(text="x = 1\n" * 10_000))
        assert "maximum context length" in (error.details() or "")
        assert tokenizer.num_encoded == 1
