"""The text that a request's pool gets, by how the request ends; over real sockets.

Its verifier feeds the pool: what `Open.keep` says when it ends the sequence itself, else what the
sequence's Close says.
"""

from pathlib import Path
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from tandem.v1 import drafter_pb2, verifier_pb2
from tandem.v1 import sampling_pb2 as sampling
from tests.gateway.running_gateway import (
    GenerateCall,
    RunningGateway,
    StartGateway,
    collect,
    read,
    until,
)
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in

STOP = sampling.FINISH_REASON_STOP
LENGTH = sampling.FINISH_REASON_LENGTH

NOTHING = drafter_pb2.KEEP_NOTHING
OUTPUT = drafter_pb2.KEEP_OUTPUT
ALL = drafter_pb2.KEEP_ALL
# The Close says it.
LATER = drafter_pb2.KEEP_UNSPECIFIED


class Feeding:
    """A request with a pool on its way through a gateway."""

    def __init__(self, running: RunningGateway, verifier: ScriptedVerifier) -> None:
        self.running = running
        self.verifier = verifier
        self.opened = verifier_pb2.Open()

    async def begin(
        self, *, stop_sequences: tuple[str, ...] = (), **speculation: Any
    ) -> GenerateCall:
        call = self.running.call(
            1,
            2,
            stop_sequences=stop_sequences,
            speculation=sampling.SpeculationParams(**{"pool": "p", **speculation}),
        )
        self.opened = await self.verifier.nth("open", 0)
        assert (await read(call)).HasField("started")
        return call

    def decide(self, base_length: int, token_ids: list[int], finish: int = 0) -> None:
        self.verifier.send(
            self.verifier.decided(self.opened.sequence_id, base_length, token_ids, finish=finish)
        )

    async def close(self) -> verifier_pb2.Close:
        """The sequence's Close; there is no other."""
        close: verifier_pb2.Close = await self.verifier.nth("close", 0)
        assert close.sequence_id == self.opened.sequence_id
        await self.assert_closes(1)
        return close

    async def assert_closes(self, number: int) -> None:
        """No more Closes come than this."""
        await self.running.until_idle()
        call = self.running.call(7)
        await self.verifier.nth("open", 1)
        assert len(self.verifier.commands("close")) == number
        call.cancel()


@pytest.fixture
async def feeding(
    start_gateway: StartGateway, verifier: ScriptedVerifier, model_folder: Path
) -> Feeding:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=["10.0.0.9:50051"], tokenizer=model_folder
    )
    return Feeding(running, verifier)


@pytest.mark.parametrize("finish", [STOP, LENGTH])
@pytest.mark.parametrize(
    ("wanted", "kept"), [(LATER, OUTPUT), (OUTPUT, OUTPUT), (ALL, ALL), (NOTHING, NOTHING)]
)
async def test_the_open_says_what_the_pool_gets_at_the_end(
    feeding: Feeding, finish: int, wanted: "drafter_pb2.Keep.ValueType", kept: int
) -> None:
    call = await feeding.begin(pool_keep=wanted)
    assert feeding.opened.keep == kept
    feeding.decide(2, [3, 4])
    feeding.decide(4, [5], finish)
    await collect(call)
    await feeding.assert_closes(0)


@pytest.mark.parametrize("kept", [OUTPUT, ALL])
@pytest.mark.parametrize("finish", [STOP, LENGTH])
async def test_with_stop_strings_the_close_says_it_after_the_end(
    feeding: Feeding, finish: int, kept: "drafter_pb2.Keep.ValueType"
) -> None:
    call = await feeding.begin(stop_sequences=("STOP",), pool_keep=kept)
    assert feeding.opened.keep == LATER
    feeding.decide(2, [3, 4])
    feeding.decide(4, [5], finish)
    await collect(call)
    close = await feeding.close()
    assert (close.keep, close.keep_length) == (kept, 5)


async def test_a_stop_string_in_the_last_step_cuts_the_fed_text(
    feeding: Feeding, tokenizer: Tokenizer
) -> None:
    output = [tokenizer.encode(character)[0] for character in "abSTOPcdef"]
    call = await feeding.begin(stop_sequences=("STOP",))
    feeding.decide(2, [5])
    feeding.decide(3, output, LENGTH)
    shown = await collect(call)
    assert len(shown.token_ids) == 1 + len("abSTOP")
    close = await feeding.close()
    assert (close.keep, close.keep_length) == (OUTPUT, 2 + len(shown.token_ids))


async def test_of_a_cancelled_text_only_what_was_shown_is_fed(
    feeding: Feeding, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop string may be in what was decided and not searched yet."""
    call = await feeding.begin(stop_sequences=("STOP",), pool_keep_cancelled=True)
    feeding.decide(2, [3, 4])
    assert (await read(call)).chunk.token_ids == [3, 4]
    # The next step is not searched any more.
    delivery = feeding.running.gateway.coordinator._delivery
    monkeypatch.setattr(delivery, "_publish", lambda generations: None)
    (generation,) = [
        each.generation for each in feeding.running.gateway.coordinator._sequences._by_id.values()
    ]
    feeding.decide(4, [tokenizer.encode(character)[0] for character in "STOPx"])
    await until(lambda: len(generation.token_ids) == 9)
    call.cancel()
    close = await feeding.close()
    assert (close.keep, close.keep_length) == (OUTPUT, 4)


@pytest.mark.parametrize("has_stops", [False, True])
@pytest.mark.parametrize(("is_wanted", "kept"), [(False, NOTHING), (True, ALL)])
async def test_a_cancelled_request_feeds_its_pool_only_on_request(
    feeding: Feeding, has_stops: bool, is_wanted: bool, kept: int
) -> None:
    call = await feeding.begin(
        stop_sequences=("STOP",) if has_stops else (), pool_keep=ALL, pool_keep_cancelled=is_wanted
    )
    feeding.decide(2, [3, 4])
    await read(call)
    call.cancel()
    close = await feeding.close()
    assert (close.keep, close.keep_length) == (kept, 4 if is_wanted else 0)


@pytest.mark.parametrize(
    ("speculation", "pool_id", "kept"),
    [
        ({}, "0:/usual", OUTPUT),
        ({"pool_keep": NOTHING}, "0:/usual", NOTHING),
        ({"pool": "own"}, "0:/own", OUTPUT),
        ({"preset": sampling.PRESET_VLLM}, "", LATER),
    ],
)
async def test_a_request_that_leaves_its_pool_open_gets_the_default_one(
    speculation: dict[str, Any],
    pool_id: str,
    kept: int,
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
) -> None:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=["10.0.0.9:50051"], default_pool="usual"
    )
    call = running.call(1, 2, speculation=sampling.SpeculationParams(**speculation))
    opened = await verifier.nth("open", 0)
    assert (opened.ngram.pool_id, opened.keep) == (pool_id, kept)
    call.cancel()
