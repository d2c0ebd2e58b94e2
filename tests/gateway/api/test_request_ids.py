"""One request id, from metadata or request, in every answer and log line of a request."""

import grpc
import pytest

from gateway.model_metrics import ModelMetrics
from tandem.v1 import gateway_pb2
from tests.gateway.running_gateway import GenerateCall, RunningGateway, StartGateway, collect, read
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.stand_in


def call(running: RunningGateway, *, metadata_id: str, field_id: str, n: int = 1) -> GenerateCall:
    request = gateway_pb2.GenerateRequest(
        tokens=gateway_pb2.TokenIds(token_ids=[1]), request_id=field_id, n=n
    )
    metadata = (("x-request-id", metadata_id),) if metadata_id else ()
    return running.stub.Generate(request, metadata=metadata)


async def trailing_id(ongoing: GenerateCall) -> str:
    return str(dict(await ongoing.trailing_metadata())["x-request-id"])


@pytest.mark.parametrize(
    ("metadata_id", "field_id", "expected"),
    [("m", "", "m"), ("", "f", "f"), ("m", "f", "f"), ("", "", None)],
    ids=["metadata", "field", "both", "none"],
)
async def test_one_request_id_is_logged_with_its_sequence_ids(
    start_gateway: StartGateway,
    verifier: ScriptedVerifier,
    monkeypatch: pytest.MonkeyPatch,
    metadata_id: str,
    field_id: str,
    expected: str | None,
) -> None:
    running = await start_gateway(verifiers=[verifier.address])
    ongoing = call(running, metadata_id=metadata_id, field_id=field_id, n=2)
    request_id = (await read(ongoing)).started.request_id
    if expected is None:
        assert len(request_id) == 32
    else:
        assert request_id == expected
    sequences = [(await verifier.nth("open", index)).sequence_id for index in range(2)]

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    # Logged by the interceptor, which knows only the call's metadata.
    monkeypatch.setattr(ModelMetrics, "observe_first_token", fail)
    for sequence_id in sequences:
        verifier.send(verifier.decided(sequence_id, 1, [5]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(ongoing)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert await trailing_id(ongoing) == request_id
    of_call = {entry["event"]: entry for entry in running.log if "request_id" in entry}
    assert set(of_call) == {"request_opened", "request_ended", "rpc_failed"}
    assert {entry["request_id"] for entry in of_call.values()} == {request_id}
    assert of_call["request_opened"]["sequence_ids"] == sequences


@pytest.mark.parametrize("field_id", ["Größe", "size\n1"])
async def test_an_id_that_metadata_cannot_carry_is_kept_everywhere_else(
    start_gateway: StartGateway, verifier: ScriptedVerifier, field_id: str
) -> None:
    verifier.play(lambda opened: [5, 0])
    running = await start_gateway(verifiers=[verifier.address])
    ongoing = call(running, metadata_id="plain", field_id=field_id)
    started = (await collect(ongoing)).started
    assert started is not None
    assert started.request_id == field_id
    assert await trailing_id(ongoing) == "plain"
    [opened] = [entry for entry in running.log if entry["event"] == "request_opened"]
    assert opened["request_id"] == field_id
