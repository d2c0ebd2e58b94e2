"""A STAND-IN for verifiers, in threads: it does not block the event loop of a test.

The real VerifierService over real gRPC, on as many addresses as are wanted. Every sequence gets
the answer that the test gives.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc

from tandem.v1 import sampling_pb2, verifier_pb2, verifier_pb2_grpc

Answer = Callable[[verifier_pb2.Open], Sequence[verifier_pb2.SessionResponse]]

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 1 << 18


def decided(
    opened: verifier_pb2.Open, done: int, token_ids: Sequence[int], **fields: Any
) -> verifier_pb2.SessionResponse:
    """One step's decision, after `done` new tokens."""
    event = verifier_pb2.Decided(
        sequence_id=opened.sequence_id,
        base_length=len(opened.token_ids) + done,
        token_ids=token_ids,
        **fields,
    )
    return verifier_pb2.SessionResponse(events=[verifier_pb2.Event(decided=event)])


def one_token(opened: verifier_pb2.Open) -> Sequence[verifier_pb2.SessionResponse]:
    """Ends every sequence with its first token."""
    return [decided(opened, 0, [5], finish_reason=sampling_pb2.FINISH_REASON_STOP)]


class ThreadedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    def __init__(self, answer: Answer = one_token) -> None:
        self.answer = answer

    def Session(
        self, request_iterator: Iterator[verifier_pb2.SessionRequest], context: Any
    ) -> Iterator[verifier_pb2.SessionResponse]:
        for message in request_iterator:
            for command in message.commands:
                kind = command.WhichOneof("command")
                if kind == "hello":
                    welcome = verifier_pb2.Welcome(
                        protocol_version=1,
                        instance_id="threads",
                        model_id="threaded",
                        limits=verifier_pb2.Limits(
                            max_model_len=MAX_MODEL_LEN,
                            max_num_seqs=64,
                            max_num_batched_tokens=512,
                            max_num_speculative_tokens=7,
                            vocab_size=VOCAB_SIZE,
                        ),
                    )
                    event = verifier_pb2.Event(welcome=welcome)
                    yield verifier_pb2.SessionResponse(events=[event])
                elif kind == "open":
                    event = verifier_pb2.Event(
                        opened=verifier_pb2.Opened(sequence_id=command.open.sequence_id)
                    )
                    yield verifier_pb2.SessionResponse(events=[event])
                    yield from self.answer(command.open)

    def Score(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    def GetModelInfo(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")

    def GetVerifierLoad(self, request: Any, context: Any) -> Any:
        raise AssertionError("no gateway calls this")


@contextlib.contextmanager
def threaded_verifiers(verifier: ThreadedVerifier, num_addresses: int) -> Iterator[list[str]]:
    """Serves one verifier on `num_addresses` addresses."""
    pool = futures.ThreadPoolExecutor(num_addresses + 2)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", 5 << 20)])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(num_addresses)]
    server.start()
    try:
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        server.stop(None).wait()
        pool.shutdown()
