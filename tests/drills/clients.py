"""Drills of clients, which leave, are late or do not read, and of the gateways that they call."""

import asyncio
import random

import grpc

from benchmarks.workloads import BUNDLED_MODEL, rename_tasks
from tandem.transport.channel import SHORT_KEEPALIVE_MS
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, sampling_pb2
from tests.drills.http2_flood import Flood
from tests.drills.link import running_link
from tests.drills.requests import Record, mixed_requests
from tests.drills.run import OK, PATIENCE_S, Run, until

_NUM_REQUESTS, _NUM_TOKENS = 8, 300
_NUM_LONG_TOKENS = 1500

# Connections of a flood, and requests that come amid it.
_NUM_FLOODS = 4
_NUM_NEWCOMERS, _NEWCOMER_INTERVAL_S = 50, 0.02

# A client that looks for its server as often as `tandem.client`.
_PING_INTERVAL_MS, _PING_TIMEOUT_MS = SHORT_KEEPALIVE_MS
_IMPATIENT = (
    ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
# A client whose transport takes little beyond what is read.
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0))
_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
_PRIVATE = (("grpc.use_local_subchannel_pool", 1),)


async def killed_gateway(run: Run) -> None:
    """A gateway is killed; its clients go on through another one."""
    gateway = run.fleet.gateways[0]
    records = await run.start(_single_choices(), through=run.channels)
    await run.underway(records)
    run.disturb(gateway.kill)
    await run.finish(records)
    run.expect_went_on(records)
    await asyncio.to_thread(gateway.stop)
    await asyncio.to_thread(gateway.start)


async def shut_down_gateway(run: Run) -> None:
    """A gateway gets SIGTERM: it finishes its streams, new requests go through another one."""
    gateway = run.fleet.gateways[0]
    await run.learn(_single_choices())
    records = await run.start(mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS))
    await run.underway(records)
    run.disturb(gateway.terminate)
    later = await run.start(_single_choices(), through=run.channels)
    await run.finish([*records, *later])
    run.expect(all(record.codes == [OK] for record in records), "a running stream broke off")
    status = await asyncio.to_thread(gateway.wait)
    run.expect(status == 0, f"{gateway.name} ended with status {status}")
    await asyncio.to_thread(gateway.start)


async def reset_client(run: Run) -> None:
    """The connections of clients are reset; they go on through another gateway."""
    with running_link(run.fleet.gateways[0].address) as link:
        async with grpc.aio.insecure_channel(link.address, options=_PRIVATE) as channel:
            records = await run.start(_single_choices(), through=[channel, run.channels[1]])
            await run.underway(records)
            run.disturb(link.reset)
            await run.finish(records)
    run.expect_went_on(records)


async def cut_off_client(run: Run) -> None:
    """Nothing passes between clients and their gateway; keepalive tells them."""
    with running_link(run.fleet.gateways[0].address) as link:
        options = (*_PRIVATE, *_IMPATIENT)
        async with grpc.aio.insecure_channel(link.address, options=options) as channel:
            records = await run.start(_single_choices(), through=[channel, run.channels[1]])
            await run.underway(records)
            run.disturb(link.cut)
            await run.finish(records)
    run.expect_went_on(records)


async def cancels(run: Run, *, count: int = 1000) -> None:
    """Clients cancel at random moments, beside others that do not."""
    draw = random.Random(count)
    requests = mixed_requests(12, num_tokens=32)
    bystanders = await run.start(mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS))
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            (record,) = await run.start([draw.choice(requests)])
            await record.has_tokens(draw.randrange(-24, 32))
            await asyncio.sleep(draw.random() * 0.02)
            run.cancel(record)
            await run.finish([record], codes=(OK, grpc.StatusCode.CANCELLED))

    await asyncio.gather(*(work() for _ in range(24)))
    await run.finish(bystanders)
    run.expect_moved(
        run.fleet.gateways[0], "tandem_request_success_total", finish_reason="cancelled"
    )


async def deadlines(run: Run) -> None:
    """Deadlines pass at every moment of a request, beside others that have none."""
    gateway = run.fleet.gateways[0]
    requests = mixed_requests(16, num_tokens=400)
    bystanders = await run.start(requests)
    late: list[Record] = []
    # Of these, the first have no time for their prompts, and the last do get tokens.
    for index, request in enumerate(requests):
        late += await run.start([request], timeout_s=0.01 * 1.45**index)
    await run.finish(late, codes=(OK, _LATE))
    exceeded = [record for record in late if record.codes[-1] is not OK]
    run.expect(any(not record.pieces for record in exceeded), "all got tokens before the deadline")
    run.expect(any(record.pieces for record in exceeded), "no deadline passed amid the output")
    await run.finish(bystanders)

    num_amid_output = sum(bool(record.pieces) for record in exceeded)

    async def are_counted() -> bool:
        # A deadline may pass before its gateway has begun the call.
        num_counted = run.moved(gateway, "tandem_request_errors_total", code="DEADLINE_EXCEEDED")
        return num_amid_output <= num_counted <= len(exceeded)

    run.expect(await until(are_counted, timeout_s=10.0), "not every deadline was counted")


async def unread(run: Run) -> None:
    """A client stops reading in the middle: its call ends, nobody else notices."""
    (task,) = rename_tasks(BUNDLED_MODEL, 1)
    request = gateway_pb2.GenerateRequest(
        tokens=gateway_pb2.TokenIds(token_ids=task.prompt_token_ids),
        sampling=sampling_pb2.SamplingParams(logprobs=20),
        max_new_tokens=_NUM_LONG_TOKENS,
        ignore_eos=True,
    )
    others = mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS)
    await run.learn([request, *others])
    record = Record(request=request)
    with run.fleet.another_gateway() as gateway:
        async with (
            grpc.aio.insecure_channel(gateway.address, options=_PRIVATE) as patient,
            grpc.aio.insecure_channel(
                gateway.address, options=(*_PRIVATE, *_SMALL_WINDOW)
            ) as channel,
        ):
            bystanders = await run.start(others, channel=patient)
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            responses = aiter(call)
            while not record.pieces:
                record.add(await anext(responses))

            async def was_ended() -> bool:
                metrics = await asyncio.to_thread(gateway.metrics)
                return metrics.total("tandem_requests_unread_total") == 1

            run.expect(
                await until(was_ended, timeout_s=2 * PATIENCE_S),
                "the call of a client that does not read goes on",
            )
            try:
                async for response in responses:
                    record.add(response)
                record.end(OK)
            except grpc.aio.AioRpcError as error:
                record.end(error.code())
            await run.finish(bystanders)
    run.expect(
        record.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED], f"it ended with {record.codes}"
    )
    run.compare(record, is_whole=False)


async def rapid_resets(run: Run, *, count: int = 20_000) -> None:
    """A client opens streams and resets each at once, beside others that do not."""
    gateway = run.fleet.gateways[0]
    later = mixed_requests(4, num_tokens=16)
    await run.learn(later)
    bystanders = await run.start(mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS))
    await run.underway(bystanders)
    method = "/tandem.v1.GenerationService/Generate"
    message = _single_choices()[0].SerializeToString()

    async def open_and_reset(num_streams: int) -> None:
        while num_streams > 0:
            # A gateway that has had enough may end the connection: the next one goes on.
            async with Flood(gateway.address, method) as connection:
                num_streams -= await connection.open_and_reset(num_streams, message=message) or 1

    async def flood_all() -> None:
        await asyncio.gather(*(open_and_reset(count // _NUM_FLOODS) for _ in range(_NUM_FLOODS)))

    # On a loop of its own: this one reads what the others get.
    flood = asyncio.create_task(asyncio.to_thread(asyncio.run, flood_all()))
    # What is sent within a second is work for the gateway for longer.
    for index in range(_NUM_NEWCOMERS):
        bystanders += await run.start([later[index % len(later)]])
        await asyncio.sleep(_NEWCOMER_INTERVAL_S)
    await flood
    await run.finish(bystanders)
    run.expect_moved(gateway, "tandem_rpc_requests_total", method="Generate", code="CANCELLED")


def _single_choices() -> list[gateway_pb2.GenerateRequest]:
    """A client can go on with one choice only."""
    return mixed_requests(_NUM_REQUESTS, num_tokens=_NUM_TOKENS, num_choices=1)
