"""The proposer for vLLM, against real drafters, with batches laid out as vLLM lays them out.

With vLLM itself: `python -m tests.integrations.vllm_identity`, beside the suite.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
import pytest

from tandem.client import DraftedSequence, NgramParams
from tandem_vllm import TandemProposer
from tandem_vllm.rows import Rows
from tests.client.late_drafter import late_drafter
from tests.client.served_drafter import ServedDrafter, served_drafter
from tests.integration.stack import wait_until

CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=4),
    model_config=SimpleNamespace(max_model_len=16_384),
)
# It repeats itself from its eleventh token on.
REPEATING = [*range(10, 20), *range(10, 16)]
FOLLOWS = [16, 17, 18, 19]


class Batch:
    """Rows as vLLM's input batch has them."""

    def __init__(self, num_rows: int) -> None:
        self.texts = np.zeros((num_rows, 16_384), dtype=np.int32)
        self.lengths = np.zeros(num_rows, dtype=np.int32)
        self.sampled: list[list[int]] = [[] for _ in range(num_rows)]

    def put(self, row: int, text: Sequence[int], num_sampled: int = 1) -> None:
        self.texts[row, : len(text)] = text
        self.lengths[row] = len(text)
        self.sampled[row] = list(text[len(text) - num_sampled :])

    async def propose(self, proposer: TandemProposer) -> list[list[int]]:
        return await asyncio.to_thread(
            proposer.propose, self.sampled, self.lengths, self.texts, slot_mappings=None
        )


@pytest.fixture
async def drafter() -> AsyncIterator[ServedDrafter]:
    async with served_drafter() as served:
        yield served


Start: TypeAlias = Callable[..., TandemProposer]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Start:
    def start(address: str, **variables: str) -> TandemProposer:
        monkeypatch.setenv("TANDEM_VLLM_DRAFTER", address)
        monkeypatch.setenv("TANDEM_VLLM_TIMEOUT_MS", "20000")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        proposer = TandemProposer(CONFIG)
        proposer.load_model("model", anything=1)
        request.addfinalizer(proposer.close)
        return proposer

    return start


async def test_drafts_follow_each_rows_text(drafter: ServedDrafter, start: Start) -> None:
    proposer, batch = start(drafter.address), Batch(3)
    batch.put(0, REPEATING)
    batch.put(2, [each + 100 for each in REPEATING])
    # Row 1 computes its prompt yet.
    assert await batch.propose(proposer) == [FOLLOWS, [], [each + 100 for each in FOLLOWS]]
    assert drafter.num_sequences == 2
    # One accepted all its drafts and one more token, the other none.
    batch.put(0, [*REPEATING, *FOLLOWS, 10], num_sampled=5)
    batch.put(2, [each + 100 for each in REPEATING] + [7])
    assert await batch.propose(proposer) == [[11, 12, 13, 14], [], []]
    assert drafter.num_sequences == 2


async def test_a_text_is_known_again_in_another_row(drafter: ServedDrafter, start: Start) -> None:
    proposer, batch = start(drafter.address), Batch(2)
    texts = [REPEATING, [each + 100 for each in REPEATING]]
    for row, text in enumerate(texts):
        batch.put(row, text)
    await batch.propose(proposer)
    for row, text in enumerate(reversed(texts)):
        batch.put(row, [*text, text[-1] + 1])
    assert await batch.propose(proposer) == [[117, 118, 119, 110], [17, 18, 19, 10]]
    assert drafter.num_sequences == 2


async def test_a_finished_request_is_released_and_its_pool_fed_for_other_servers(
    drafter: ServedDrafter, start: Start
) -> None:
    first = start(drafter.address, TANDEM_VLLM_POOL="fleet")
    batch = Batch(1)
    batch.put(0, REPEATING)
    await batch.propose(first)
    batch.sampled[0] = []
    for _ in range(65):
        await batch.propose(first)
    await wait_until(lambda: drafter.num_sequences == 0)
    await drafter.drafter.pool_keeper.settle()
    second = start(drafter.address, TANDEM_VLLM_POOL="fleet")
    batch.put(0, [12, 13, 14])
    assert await batch.propose(second) == [[15, 16, 17, 18]]


@pytest.mark.stand_in
async def test_a_step_waits_no_longer_than_it_may_and_then_not_at_all(start: Start) -> None:
    batch = Batch(1)
    batch.put(0, REPEATING)
    async with late_drafter() as late:
        proposer = start(late.address, TANDEM_VLLM_TIMEOUT_MS="200")
        for most_s in (5.0, 0.15):
            begun_s = time.monotonic()
            assert await batch.propose(proposer) == [[]]
            assert time.monotonic() - begun_s < most_s


async def test_a_drafter_that_comes_back_is_asked_again(start: Start) -> None:
    batch = Batch(1)
    batch.put(0, REPEATING)
    async with served_drafter() as served:
        address = served.address
        proposer = start(address)
        assert await batch.propose(proposer) == [FOLLOWS]
    assert await batch.propose(proposer) == [[]]
    async with served_drafter(listen=address):
        proposer._paused_until_s = 0.0
        for _ in range(100):
            if await batch.propose(proposer) == [FOLLOWS]:
                return
            await asyncio.sleep(0.1)
    pytest.fail("no drafts")


async def test_a_long_prompt_is_sent_beside_the_steps(drafter: ServedDrafter, start: Start) -> None:
    proposer, batch = start(drafter.address), Batch(1)
    text = [*range(1000, 9000), *REPEATING]
    batch.put(0, text)
    assert await batch.propose(proposer) == [[]]
    for _ in range(100):
        if (drafts := await batch.propose(proposer)) != [[]]:
            break
        await asyncio.sleep(0.1)
    assert drafts == [FOLLOWS]


async def test_no_error_reaches_vllm(drafter: ServedDrafter, start: Start) -> None:
    proposer, batch = start(drafter.address), Batch(1)
    batch.put(0, REPEATING)
    batch.texts[0, 3] = -5
    assert await batch.propose(proposer) == [[]]
    batch.lengths = np.zeros(0, dtype=np.int32)
    assert await batch.propose(proposer) == [[]]


def test_what_is_configured_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_VLLM_DRAFTER", raising=False)
    with pytest.raises(ValueError, match="TANDEM_VLLM_DRAFTER is not set"):
        TandemProposer(CONFIG)
    monkeypatch.setenv("TANDEM_VLLM_DRAFTER", "127.0.0.1:1")
    for name, value in (
        ("TANDEM_VLLM_TIMEOUT_MS", "nan"),
        ("TANDEM_VLLM_PROMPT_LOOKUP_MIN", "0"),
        ("TANDEM_VLLM_PROMPT_LOOKUP_MAX", "x"),
    ):
        with monkeypatch.context() as one:
            one.setenv(name, value)
            with pytest.raises(ValueError, match=f"{name} is '{value}'"):
                TandemProposer(CONFIG)


def test_rows_follow_any_reordering() -> None:
    """Texts come, grow, change rows, pause and go; a sequence is never another text's."""
    rng = np.random.default_rng(7)
    rows, owners = Rows(), dict[int, DraftedSequence]()
    texts: dict[int, list[int]] = {}
    for step in range(600):
        if len(texts) < 6 and rng.random() < 0.4:
            # Many begin alike.
            texts[step] = [1, 2, 3, step % 2] * int(rng.integers(1, 4)) + [step]
        if texts and rng.random() < 0.1:
            gone = int(rng.choice(list(texts)))
            del texts[gone]
            owners.pop(gone, None)
        names = [name for name in texts if rng.random() < 0.9 or name not in owners]
        rng.shuffle(names)
        for name in names:
            texts[name] += rng.integers(0, 3, size=rng.integers(1, 4)).tolist()
        given, over = rows.step(
            {row: np.array(texts[name], dtype=np.int32) for row, name in enumerate(names)},
            lambda _: DraftedSequence(params=NgramParams(), prompt_length=None, max_length=0),
        )
        for row, name in enumerate(names):
            assert owners.setdefault(name, given[row].sequence) is given[row].sequence
            assert given[row].text.tolist() == texts[name]
        assert not {each.sequence for each in over} & set(owners.values())
