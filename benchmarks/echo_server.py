"""A bare gRPC server that answers every message of a stream with one of a given size.

    python -m benchmarks.echo_server

The cost of a stream without protobuf or work. A message of 8 bytes sets the size (little endian),
which is 0 at first.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

METHOD = "/tandem.benchmarks.Echo/Stream"


async def _stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    answer = b""
    async for request in requests:
        if len(request) == 8:
            answer = bytes(int.from_bytes(request, "little"))
        yield answer


async def main() -> None:
    """Prints its address, and serves until it is stopped."""
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(_stream)
    _, service, method = METHOD.split("/")
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {method: handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
