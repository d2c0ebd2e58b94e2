"""No large but valid message blocks the event loop: each turn does a small part of its work.

Kernels do most of it, and time slices part it: so a turn's processor time is compared with that of
the whole.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from drafter.batch.wire import MAX_MESSAGE_BYTES, MAX_SEQUENCES_PER_BATCH
from drafter.ngram.table import MAX_TEXT_TOKENS
from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import drafter_pb2_grpc as rpc
from tests.drafter.deltas import replay

ROOT = Path(__file__).parents[2]


@dataclass
class LoopTimedDrafter:
    """The process, and a client of it."""

    process: subprocess.Popen[str]
    stub: rpc.DrafterServiceStub

    def command(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def exchange(self, requests: Iterable[pb.ProposeRequest]) -> list[pb.ProposeResponse]:
        """All on one stream, which then ends."""
        return list(self.stub.ProposeStream(iter(requests)))

    def check_loop(self, *, largest_share: float = 0.1) -> None:
        """A turn did no larger share of the loop's work since the last time."""
        assert self.command("settle") == "done"
        longest_s, total_s = map(float, self.command("times").split())
        assert 0 < longest_s < largest_share * total_s


@pytest.fixture(scope="module")
def timed_drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopTimedDrafter]:
    folder = tmp_path_factory.mktemp("pools")
    command = [sys.executable, "-m", "tests.drafter.loop_timed_drafter", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip()
        with grpc.insecure_channel(address) as channel:
            drafter = LoopTimedDrafter(process, rpc.DrafterServiceStub(channel))
            drafter.command("times")
            yield drafter
        process.stdin.close()


def long_text(num_tokens: int) -> list[int]:
    """Short pieces of it repeat everywhere, and its end repeats two tokens."""
    tokens: list[int] = np.random.default_rng(1).integers(0, 4, num_tokens).tolist()
    tokens[-5:] = [8, 9, 8, 9, 8]
    return tokens


def replay_requests(
    sequence_id: str, tokens: list[int], params: pb.NgramParams
) -> list[pb.ProposeRequest]:
    deltas = replay(sequence_id, tokens, max_draft_tokens=8, params=params)
    return [pb.ProposeRequest(sequences=[delta]) for delta in deltas]


@pytest.mark.parametrize("tie", [pb.TIE_EARLIEST, pb.TIE_LONGEST])
def test_the_longest_text_is_scanned(
    timed_drafter: LoopTimedDrafter, tie: "pb.Tie.ValueType"
) -> None:
    params = pb.NgramParams(
        min_ngram=1, max_ngram=32, tie=tie, algorithm=pb.ALGORITHM_KMP,
        overlap=pb.OVERLAP_ALLOWED,
    )  # fmt: skip
    params.tokens_per_match = 0
    tokens = long_text(MAX_TEXT_TOKENS)
    requests = replay_requests("scanned", tokens, params)
    for request in requests:
        request.sequences[0].max_draft_tokens = 0
    requests[-1].sequences[0].max_draft_tokens = 100
    [proposal] = timed_drafter.exchange(requests)[-1].proposals
    assert list(proposal.token_ids) == [9, 8]
    timed_drafter.check_loop()


def test_a_million_tokens_are_replayed_and_kept(timed_drafter: LoopTimedDrafter) -> None:
    params = pb.NgramParams(min_ngram=1, tie=pb.TIE_LONGEST, pool_id="long")
    timed_drafter.exchange(replay_requests("replayed", long_text(1_000_000), params))
    release = pb.Release(sequence_id="replayed", keep=pb.KEEP_ALL)
    timed_drafter.exchange([pb.ProposeRequest(releases=[release])])
    timed_drafter.check_loop()
    assert timed_drafter.stub.GetDrafterLoad(pb.GetDrafterLoadRequest()).pool_bytes > 4_000_000


def whole_batch(
    base_length: int, tokens: list[int], params: pb.NgramParams, count: int
) -> pb.ProposeRequest:
    request = pb.ProposeRequest(
        sequences=[
            pb.SequenceDelta(
                sequence_id=f"{i:032x}",
                base_length=base_length,
                token_ids=tokens,
                max_draft_tokens=1000,
                params=None if base_length else params,
            )
            for i in range(count)
        ]
    )
    assert request.ByteSize() <= MAX_MESSAGE_BYTES
    return request


@pytest.mark.parametrize(
    ("count", "is_pooled"),
    [(512, True), (512, False), (MAX_SEQUENCES_PER_BATCH, True)],
)
def test_as_many_sequences_as_a_batch_may_have_are_answered_and_released(
    timed_drafter: LoopTimedDrafter, count: int, is_pooled: bool
) -> None:
    params = pb.NgramParams(min_ngram=1, tie=pb.TIE_LATEST, overlap=pb.OVERLAP_ALLOWED)
    if is_pooled:
        params.pool_id = "many"
    else:
        params.max_ngram = 32
    tokens = [7] * 150
    requests = [whole_batch(step * 150, tokens, params, count) for step in range(3)]
    # With an unknown field, so that protobuf has to normalize it.
    odd = whole_batch(450, tokens, params, count).SerializeToString()
    unknown_field = bytes([15 << 3, 1])
    requests.append(pb.ProposeRequest.FromString(odd + unknown_field))
    *_, last = timed_drafter.exchange(requests)
    assert all(len(proposal.token_ids) > 0 for proposal in last.proposals)
    releases = [
        pb.Release(sequence_id=delta.sequence_id, keep=pb.KEEP_ALL)
        for delta in requests[0].sequences
    ]
    assert len(releases) <= 4096
    half = len(releases) // 2
    timed_drafter.exchange([pb.ProposeRequest(releases=releases[:half])])
    timed_drafter.stub.Release(pb.ReleaseRequest(releases=releases[half:]))
    # A message in a single turn would be a quarter. protobuf reads each in one, whose share is the
    # larger, the faster the processor runs kernels.
    timed_drafter.check_loop(largest_share=0.16)


def test_large_pools_are_written(timed_drafter: LoopTimedDrafter) -> None:
    """The tests above have filled the pools."""
    load = timed_drafter.stub.GetDrafterLoad(pb.GetDrafterLoadRequest())
    if load.pool_bytes < 4_000_000:
        test_a_million_tokens_are_replayed_and_kept(timed_drafter)
    assert timed_drafter.command("snapshot") == "done"
    timed_drafter.check_loop(largest_share=0.4)
