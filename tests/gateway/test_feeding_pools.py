"""The text that a request's pool gets, by how the request ends; over real sockets."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.text.tokenizer import Tokenizer
from tandem.v1 import drafter_pb2
from tandem.v1 import sampling_pb2 as sampling
from tests.gateway.running_gateway import (
    GenerateCall,
    RunningGateway,
    StartGateway,
    collect,
    error_of,
)
from tests.gateway.scripted_drafter import ScriptedDrafter
from tests.gateway.scripted_verifier import ScriptedVerifier

STOP = sampling.FINISH_REASON_STOP
LENGTH = sampling.FINISH_REASON_LENGTH


class Feeding:
    """A request with a pool on its way through a gateway."""

    def __init__(
        self, running: RunningGateway, verifier: ScriptedVerifier, drafter: ScriptedDrafter
    ) -> None:
        self.running = running
        self.verifier = verifier
        self.drafter = drafter
        self.sequence_id = ""

    async def begin(
        self, *, stop_sequences: tuple[str, ...] = (), **speculation: Any
    ) -> GenerateCall:
        call = self.running.call(
            1,
            2,
            stop_sequences=stop_sequences,
            speculation=sampling.SpeculationParams(**{"pool": "p", **speculation}),
        )
        self.sequence_id = (await self.verifier.nth("open", 0)).sequence_id
        await self.drafter.nth(0)
        return call

    async def decide(self, base_length: int, token_ids: list[int], finish: int = 0) -> None:
        """Sends a step, and waits until the drafter has its tokens."""
        self.verifier.send(
            self.verifier.decided(self.sequence_id, base_length, token_ids, finish=finish, wanted=8)
        )
        if not finish:
            end = base_length + len(token_ids)
            await self.drafter.until(
                lambda: any(
                    delta.base_length + len(delta.token_ids) == end
                    for delta in self.drafter.deltas()
                )
            )

    async def release(self) -> drafter_pb2.Release:
        drafter = self.drafter
        await drafter.until(lambda: drafter.releases() == [self.sequence_id])
        await self.running.until_idle()
        [release] = [each for batch in drafter.batches for each in batch.releases]
        return release


@pytest.fixture
async def feeding(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    scripted_drafter: ScriptedDrafter,
    model_folder: Path,
) -> Feeding:
    running = await start_gateway(
        verifiers=[verifier.address], drafters=[scripted_drafter.address], tokenizer=model_folder
    )
    return Feeding(running, verifier, scripted_drafter)


@pytest.mark.parametrize("finish", [STOP, LENGTH])
@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (drafter_pb2.KEEP_UNSPECIFIED, drafter_pb2.KEEP_OUTPUT),
        (drafter_pb2.KEEP_OUTPUT, drafter_pb2.KEEP_OUTPUT),
        (drafter_pb2.KEEP_ALL, drafter_pb2.KEEP_ALL),
        (drafter_pb2.KEEP_NOTHING, drafter_pb2.KEEP_UNSPECIFIED),
    ],
)
async def test_at_its_end_a_request_feeds_its_pool_what_pool_keep_says(
    feeding: Feeding, finish: int, wanted: "drafter_pb2.Keep.ValueType", kept: int
) -> None:
    call = await feeding.begin(pool_keep=wanted)
    await feeding.decide(2, [3, 4])
    await feeding.decide(4, [5], finish)
    await collect(call)
    release = await feeding.release()
    assert (release.keep, release.length) == (kept, 0)


async def test_text_after_a_stop_string_is_not_fed(feeding: Feeding, tokenizer: Tokenizer) -> None:
    output = [tokenizer.encode(character)[0] for character in "abSTOPcdef"]
    call = await feeding.begin(stop_sequences=("STOP",))
    await feeding.decide(2, output)
    shown = await collect(call)
    assert len(shown.token_ids) < len(output)
    release = await feeding.release()
    assert release.keep == drafter_pb2.KEEP_OUTPUT
    assert release.length == 2 + len(shown.token_ids)


async def test_a_stop_string_in_the_last_step_cuts_the_fed_text(
    feeding: Feeding, tokenizer: Tokenizer
) -> None:
    output = [tokenizer.encode(character)[0] for character in "abSTOPcdef"]
    call = await feeding.begin(stop_sequences=("STOP",))
    await feeding.decide(2, [5])
    await feeding.decide(3, output, LENGTH)
    shown = await collect(call)
    release = await feeding.release()
    assert release.keep == drafter_pb2.KEEP_OUTPUT
    fed = [token for delta in feeding.drafter.deltas() for token in delta.token_ids]
    assert fed[2 : release.length or None] == shown.token_ids


@pytest.mark.parametrize(
    ("is_wanted", "kept"), [(False, drafter_pb2.KEEP_UNSPECIFIED), (True, drafter_pb2.KEEP_ALL)]
)
@pytest.mark.parametrize("how", ["cancel", "failure", "verifier gone"])
async def test_a_cancelled_or_failed_request_feeds_its_pool_only_on_request(
    feeding: Feeding, how: str, is_wanted: bool, kept: int
) -> None:
    call = await feeding.begin(pool_keep=drafter_pb2.KEEP_ALL, pool_keep_cancelled=is_wanted)
    await feeding.decide(2, [3, 4])
    if how == "cancel":
        call.cancel()
    elif how == "failure":
        feeding.verifier.send(
            feeding.verifier.rejected(feeding.sequence_id, code=grpc.StatusCode.INTERNAL.value[0])
        )
        await error_of(call)
    else:
        feeding.verifier.end_session()
        await error_of(call)
    release = await feeding.release()
    assert (release.keep, release.length) == (kept, 0)


async def test_pool_feed_tokens_reach_the_drafter(
    feeding: Feeding,
) -> None:
    call = await feeding.begin(pool_keep=drafter_pb2.KEEP_ALL, pool_feed_tokens=32)
    created = feeding.drafter.deltas()[0].params
    assert (created.pool_keep, created.pool_feed_tokens) == (drafter_pb2.KEEP_ALL, 32)
    assert created.pool_id.endswith("/p")
    call.cancel()
    assert (await feeding.release()).keep == drafter_pb2.KEEP_UNSPECIFIED
