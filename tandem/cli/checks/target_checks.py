"""What `tandem doctor` asks of a gateway: whether it answers, what it serves, its certificate."""

import dataclasses
import datetime
import errno
import os
import re
import socket
import ssl
from collections.abc import Iterator

from tandem.cli.checks.check import Check, fail, ok, sampling_check, warn
from tandem.cli.connection_flags import UNREACHED_ADVICE, reason_unreached
from tandem.cli.tls_context import tls_context
from tandem.client import TandemClient, TandemError
from tandem.transport.channel import TlsOptions, load_own_certificate

_SCHEME = re.compile(r"^(dns|ipv4|ipv6):")
_TIMEOUT_S = 5.0
# What gRPC says at the end where nobody listens.
_REFUSED = os.strerror(errno.ECONNREFUSED)
_EXPIRES_SOON = datetime.timedelta(days=14)


def target(
    address: str,
    *,
    tls: TlsOptions | None,
    token: str | None,
    allow_plaintext_token: bool,
    is_expected: bool,
) -> Iterator[Check]:
    """A gateway at HOST:PORT.

    Args:
        is_expected: False: it is no failure that nobody serves there.
    """
    name = f"gateway {address}"
    if tls is not None:
        try:
            context = _context(tls)
        except OSError as error:
            yield fail(name, str(error), "correct the files of --tls-*")
            return
        yield _certificate(address, context)
    try:
        with TandemClient(
            address, tls=tls, token=token, allow_plaintext_token=allow_plaintext_token, retry=None
        ) as client:
            models = client.list_models(timeout_s=_TIMEOUT_S)
    except TandemError as error:
        reason = reason_unreached(error)
        text = f"{reason or error} ({error.code.name})"
        if not is_expected and reason is not None and reason.endswith(_REFUSED):
            yield warn(name, "nobody answers there", "start the services: tandem up")
        elif error.code.name == "UNAUTHENTICATED":
            yield fail(name, text, "give a valid token or certificate: --token-file, --tls-cert")
        else:
            yield fail(name, text, UNREACHED_ADVICE)
        return
    except (OSError, ValueError) as error:
        yield fail(name, str(error), "correct the address, the token or the files of --tls-*")
        return
    if not models:
        yield fail(name, "answers, and no verifier is connected", "see the gateway's logs")
        return
    served = ", ".join(f"{each.model_id} ({_verifiers(each.num_verifiers)})" for each in models)
    yield ok(name, f"serves {served}")
    for each in models:
        if each.speculation_note:
            yield ok(f"speculation {each.model_id}", each.speculation_note)
        if each.http_sampling_defaults is not None:
            yield sampling_check(
                f"sampling {each.model_id}", dataclasses.asdict(each.http_sampling_defaults)
            )


def _verifiers(count: int) -> str:
    return "1 verifier" if count == 1 else f"{count} verifiers"


def _context(tls: TlsOptions) -> ssl.SSLContext:
    context = tls_context(tls.ca)
    # The client itself refuses one without the other.
    if tls.certificate is not None and tls.key is not None:
        load_own_certificate(context, tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    return context


def _certificate(address: str, context: ssl.SSLContext) -> Check:
    """Whether the server's certificate is trusted, and for how long."""
    name = f"certificate {address}"
    # As gRPC names it, possibly with a scheme: dns:///host:port, ipv4:host:port.
    host, _, port = _SCHEME.sub("", address).rpartition("/")[2].rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=host.strip("[]")) as connection,
        ):
            peer = connection.getpeercert()
    except ssl.SSLCertVerificationError as error:
        return fail(name, error.verify_message, "name the right authority with --tls-ca")
    except (OSError, ValueError) as error:
        return fail(name, str(error), "check the address, and that the server speaks TLS")
    assert peer is not None, "a verified connection has a certificate"
    end = datetime.datetime.fromtimestamp(
        ssl.cert_time_to_seconds(str(peer["notAfter"])), tz=datetime.UTC
    )
    if end - datetime.datetime.now(tz=datetime.UTC) < _EXPIRES_SOON:
        return warn(name, f"is valid until {end:%Y-%m-%d}", "renew it")
    return ok(name, f"is trusted, and valid until {end:%Y-%m-%d}")
