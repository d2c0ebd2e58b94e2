"""A stand-in drafter that answers with wrong drafts of every kind.

python -m tests.drills.lying_drafter --listen HOST:PORT
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem.v1 import drafter_pb2 as pb
from tandem.v1 import drafter_pb2_grpc as rpc

KINDS = ("garbage", "out of range", "stale", "ahead", "too long", "right", "empty")


class LyingDrafter(rpc.DrafterServiceServicer):
    """Keeps each sequence's tokens, like a real drafter, and proposes wrong continuations."""

    def __init__(self) -> None:
        self.num_lies = dict.fromkeys(KINDS, 0)
        # The real output by prompt. The kind "right" proposes it, so that drafts are scheduled.
        self.outputs: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._histories: dict[str, list[int]] = {}
        self._choice = random.Random(3)

    async def ProposeStream(
        self,
        request_iterator: AsyncIterator[pb.ProposeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.ProposeResponse]:
        async for request in request_iterator:
            yield pb.ProposeResponse(
                batch_id=request.batch_id,
                proposals=[self._proposal(delta) for delta in request.sequences],
            )

    async def Propose(
        self, request: pb.ProposeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ProposeResponse:
        raise AssertionError("a verifier uses the stream")

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleaseResponse:
        raise AssertionError("a verifier uses the stream")

    async def GetDrafterLoad(
        self, request: pb.GetDrafterLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetDrafterLoadResponse:
        return pb.GetDrafterLoadResponse()

    def _proposal(self, delta: pb.SequenceDelta) -> pb.Proposal:
        history = self._histories.setdefault(delta.sequence_id, [])
        del history[delta.base_length :]
        history += delta.token_ids
        length = len(history)
        proposal = pb.Proposal(
            sequence_id=delta.sequence_id, base_length=length, status=pb.STATUS_OK
        )
        if not delta.max_draft_tokens:
            return proposal
        choice = self._choice
        kind = choice.choice(KINDS)
        self.num_lies[kind] += 1
        if kind == "garbage":
            proposal.token_ids.extend(choice.randrange(2048) for _ in range(8))
        elif kind == "out of range":
            proposal.token_ids.extend([history[-1], 2048, 2**31, 2**32 - 1])
        elif kind == "stale":
            proposal.base_length = max(1, length - choice.randrange(1, 9))
            proposal.token_ids.extend(history[:24])
        elif kind == "ahead":
            proposal.base_length = length + choice.randrange(1, 2**31)
            proposal.token_ids.extend(history[:8])
        elif kind == "too long":
            num_tokens = delta.max_draft_tokens + 20
            proposal.token_ids.extend(choice.randrange(2048) for _ in range(num_tokens))
        elif kind == "right":
            for prompt, output in self.outputs.items():
                if tuple(history[: len(prompt)]) == prompt:
                    proposal.token_ids.extend(output[length - len(prompt) :][:24])
        return proposal


async def serve(listen: str) -> None:
    """Prints its address, and serves until it is stopped."""
    server = grpc.aio.server()
    rpc.add_DrafterServiceServicer_to_server(LyingDrafter(), server)
    server.add_insecure_port(listen)
    await server.start()
    print(f"ready grpc={listen}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", required=True)
    # Whoever starts services gives more flags, which mean nothing here.
    arguments, _ = parser.parse_known_args()
    asyncio.run(serve(arguments.listen))


if __name__ == "__main__":
    main()
