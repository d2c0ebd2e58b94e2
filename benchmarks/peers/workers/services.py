"""Tandem's whole stack: drafter, verifier and gateway as processes, and this one as the client."""

import asyncio
import atexit
import contextlib
from collections.abc import Sequence

from benchmarks.peers.protocol import SPECULATION, Generate, Options, Request, serve
from benchmarks.services import running_stack
from tandem.client import AsyncTandemClient, GenerationRequest, SpeculationParams


def start(options: Options) -> Generate:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    gateway = stack.enter_context(
        running_stack(
            model=options.model,
            verifier_flags=[
                *("--dtype", options.dtype, "--threads", str(options.threads)),
                "--no-prefix-cache",
            ],
        )
    )
    runner = stack.enter_context(asyncio.Runner())
    client = AsyncTandemClient(gateway.address, retry=None)
    stack.callback(lambda: runner.run(client.close()))

    async def generate_all(
        requests: Sequence[Request], streams: int, speculation: SpeculationParams
    ) -> list[list[int]]:
        waiting = list(enumerate(requests))[::-1]
        outputs: list[list[int]] = [[] for _ in requests]

        async def one_stream() -> None:
            while waiting:
                index, request = waiting.pop()
                generation = await client.generate(
                    GenerationRequest(
                        prompt=request.prompt,
                        max_new_tokens=request.max_new_tokens,
                        speculation=speculation,
                    )
                )
                outputs[index] = list(generation.token_ids)

        await asyncio.gather(*(one_stream() for _ in range(streams)))
        return outputs

    def generate(mode: str, requests: Sequence[Request], streams: int) -> list[list[int]]:
        speculation = SpeculationParams(enabled=mode == SPECULATION)
        return runner.run(generate_all(requests, streams, speculation))

    return generate


if __name__ == "__main__":
    serve(start)
