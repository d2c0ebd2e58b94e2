"""Drills of who may call the gateway, and how much: load beyond its limits, and credentials."""

import asyncio
import datetime
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import trustme
import yaml

from servicekit.errors import retry_after_ms
from tandem.v1 import gateway_pb2
from tests.drills.requests import Record, generate, mixed_requests
from tests.drills.run import OK, Run, until
from tests.drills.whole_file import write_whole

_ADMITTED = 12
_PRESS_INTERVAL_S = 0.25
_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
_LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_PRIVATE = (("grpc.use_local_subchannel_pool", 1),)


async def overload(run: Run) -> None:
    """Of two tenants, one asks for three times what is admitted; the other one notices nothing."""
    greedy, modest = secrets.token_hex(), secrets.token_hex()
    clients = run.fleet.folder / "clients.yaml"
    _write_clients(clients, {"greedy": [greedy], "modest": [modest]})
    requests = mixed_requests(_ADMITTED, num_tokens=200, num_choices=1)
    await run.learn(requests)
    flags = ("--clients", str(clients), "--max-concurrent-requests", str(_ADMITTED))
    with run.fleet.another_gateway(*flags) as gateway:
        async with grpc.aio.insecure_channel(gateway.address, options=_PRIVATE) as channel:
            await _serves(channel, modest)
            is_over = asyncio.Event()
            many: list[Record] = []

            async def press(request: gateway_pb2.GenerateRequest) -> None:
                while not is_over.is_set():
                    records = await run.start([request], channel=channel, token=greedy)
                    many.extend(records)
                    await run.finish(records, codes=(OK, grpc.StatusCode.RESOURCE_EXHAUSTED))
                    await asyncio.sleep(_PRESS_INTERVAL_S)

            async with asyncio.TaskGroup() as clients_of_greedy:
                for request in requests * 3:
                    clients_of_greedy.create_task(press(request))
                for request in requests[:4]:
                    await run.finish(await run.start([request], channel=channel, token=modest))
                is_over.set()
            refused = [record for record in many if record.codes[-1] is not OK]
            run.expect(bool(refused), "nothing was refused")
            run.expect(len(refused) < len(many), "everything was refused")
            for record in refused:
                run.expect(not record.pieces, "a request was refused after its first token")
                run.expect(
                    record.error is not None and bool(retry_after_ms(record.error)),
                    "a refusal does not say when to come again",
                )
            num_shed = gateway.metrics().total("tandem_requests_shed_total")
            run.expect(
                num_shed == len(refused), f"{len(refused)} refused, {num_shed:g} counted as shed"
            )


async def credentials(run: Run) -> None:
    """Clients with no, wrong and expired certificates and tokens; all are renewed under load."""
    folder = run.fleet.folder
    old, new, stranger = trustme.CA(), trustme.CA(), trustme.CA()
    first_token, second_token, expired_token = (secrets.token_hex() for _ in range(3))
    clients = folder / "clients.yaml"
    _write_clients(clients, {"ours": [first_token]}, expired={"ours": [expired_token]})
    _write_certificate(folder, old, authorities=[old])
    flags = (
        *("--tls-cert", str(folder / "tls.pem"), "--tls-key", str(folder / "tls.key")),
        *("--tls-client-ca", str(folder / "ca.pem"), "--clients", str(clients)),
    )
    requests = mixed_requests(4, num_tokens=100, num_choices=1)
    await run.learn(requests)
    with run.fleet.another_gateway(*flags) as gateway:

        def connect(
            trusted: Sequence[trustme.CA] = (old, new), certificate: trustme.LeafCert | None = None
        ) -> grpc.aio.Channel:
            key = chain = None
            if certificate is not None:
                key = certificate.private_key_pem.bytes()
                chain = certificate.cert_chain_pems[0].bytes()
            roots = b"".join(authority.cert_pem.bytes() for authority in trusted)
            credentials = grpc.ssl_channel_credentials(roots, key, chain)
            return grpc.aio.secure_channel(gateway.address, credentials, options=_PRIVATE)

        async def status(channel: grpc.aio.Channel, token: str | None) -> grpc.StatusCode:
            async with channel:
                record = Record(request=requests[0])
                await generate(channel, record, token=token)
                return record.codes[-1]

        good = old.issue_cert("client.test")
        async with connect(certificate=good) as channel:
            await _serves(channel, first_token)
        expired = old.issue_cert("client.test", not_before=_LONG_AGO, not_after=_LONG_AGO)
        strange = stranger.issue_cert("client.test")
        unavailable = grpc.StatusCode.UNAVAILABLE
        for what, channel, token, expected in (
            ("no certificate", connect(), first_token, unavailable),
            ("another authority's", connect(certificate=strange), first_token, unavailable),
            ("an expired certificate", connect(certificate=expired), first_token, unavailable),
            ("a server not trusted", connect([stranger], good), first_token, unavailable),
            ("no token", connect(certificate=good), None, _UNAUTHENTICATED),
            ("a wrong token", connect(certificate=good), second_token, _UNAUTHENTICATED),
            ("an expired token", connect(certificate=good), expired_token, _UNAUTHENTICATED),
            ("all that it takes", connect(certificate=good), first_token, OK),
        ):
            code = await status(channel, token)
            run.expect(code is expected, f"with {what}: {code.name}, not {expected.name}")

        token, certificate = first_token, good
        is_over = asyncio.Event()

        async def load(request: gateway_pb2.GenerateRequest) -> None:
            while not is_over.is_set():
                async with connect(certificate=certificate) as channel:
                    await run.finish(await run.start([request], channel=channel, token=token))

        async with asyncio.TaskGroup() as streams:
            for request in requests:
                streams.create_task(load(request))
            # Each is added before the old one goes: no client is locked out meanwhile.
            _write_certificate(folder, new, authorities=[old, new])
            _write_clients(clients, {"ours": [first_token, second_token]})
            renewed = new.issue_cert("client.test")

            async def admits_new() -> bool:
                return await status(connect([new], renewed), second_token) is OK

            run.expect(await until(admits_new), "the new certificates and token are not admitted")
            token, certificate = second_token, renewed
            _write_clients(clients, {"ours": [second_token]})

            async def refuses_old() -> bool:
                code = await status(connect([new], renewed), first_token)
                return code is _UNAUTHENTICATED

            run.expect(await until(refuses_old), "the old token is still admitted")
            is_over.set()
        for files in ("clients", "server_certificate"):
            num_reloads = gateway.metrics().total(
                "tandem_file_reloads_total", files=files, outcome="success"
            )
            run.expect(num_reloads > 0, f"no reload of {files} was counted")


async def _serves(channel: grpc.aio.Channel, token: str) -> None:
    """Waits until a gateway that has just started has a verifier."""

    async def is_served() -> bool:
        record = Record(request=mixed_requests(1, num_tokens=1)[0])
        await generate(channel, record, token=token)
        return record.codes == [OK]

    assert await until(is_served), "the gateway does not serve"


def _write_clients(
    path: Path,
    tokens: Mapping[str, Sequence[str]],
    *,
    expired: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """The gateway's file of clients: each tenant's tokens."""
    tenants = {
        tenant: {
            "clients": [
                *({"token_sha256": _digest(token)} for token in its),
                *(
                    {"token_sha256": _digest(token), "expires": _LONG_AGO}
                    for token in (expired or {}).get(tenant, ())
                ),
            ]
        }
        for tenant, its in tokens.items()
    }
    write_whole(path, yaml.safe_dump({"tenants": tenants}).encode())


def _write_certificate(
    folder: Path, authority: trustme.CA, *, authorities: Sequence[trustme.CA]
) -> None:
    """The gateway's certificate, its key, and whose clients it admits."""
    certificate = authority.issue_cert("127.0.0.1")
    write_whole(folder / "ca.pem", b"".join(each.cert_pem.bytes() for each in authorities))
    write_whole(folder / "tls.pem", certificate.cert_chain_pems[0].bytes())
    write_whole(folder / "tls.key", certificate.private_key_pem.bytes())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
