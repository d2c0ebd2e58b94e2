"""Client channels: addresses, TLS, tokens, and the settings that every client shares.

Knows no service. Argument names: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
"""

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.transport.renewed_channel import RenewedAsyncChannel, RenewedChannel

# While a call is open, a server that vanished without closing the connection is noticed within the
# sum of both. A server of Tandem takes a ping every 0.5 s.
_KEEPALIVE_MS = (10_000, 5_000)
#: The same for calls that go on elsewhere once they are cut off. A slow link looks like a server
#: that vanished, so only first attempts use it: a call that it has cut off goes on over a channel
#: with the long keepalive (`tandem.transport.retry`).
SHORT_KEEPALIVE_MS = (800, 800)

_CHANNEL_OPTIONS = (
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted server is found within seconds; an absent one gets few attempts.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # New replicas of a name are found soon after a connection has ended.
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
    # Connections of its own, without another channel's backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.primary_user_agent", "tandem-client"),
)
# The addresses of one name take turns, and those that cannot be reached are skipped.
_ROUND_ROBIN = ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """How to reach a server that speaks TLS. Files are PEM; they are read again when they change:
    calls that begin later use what they hold then.
    """

    ca: Path | None = None
    """Certificates to trust; None trusts the system's."""
    certificate: Path | None = None
    """The client's own certificate, for a server that asks for one (mTLS); needs `key`."""
    key: Path | None = None
    """The private key of `certificate`."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files.

        Raises:
            ValueError: only one of certificate and key is given.
            OSError: a file cannot be read.
        """
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS: certificate and key belong together")
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca.read_bytes() if self.ca else None,
            private_key=self.key.read_bytes() if self.key else None,
            certificate_chain=self.certificate.read_bytes() if self.certificate else None,
        )


def _check(tls: TlsOptions) -> None:
    """Whether the files hold certificates, and a key that belongs to its own.

    Raises:
        OSError: they do not, or cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
    if tls.certificate is not None:
        load_own_certificate(context, tls.certificate, tls.key)


def load_own_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Loads a client's certificate and its key.

    Raises:
        OSError: they cannot be read, do not belong together, or the key has a passphrase.
    """

    def refuse() -> str:
        # OpenSSL would ask for it on the terminal, and gRPC cannot use such a key at all.
        raise OSError(f"{key or certificate} is encrypted; give a key without passphrase")

    context.load_cert_chain(certificate, key, password=refuse)


def parse_targets(targets: str | Sequence[str]) -> tuple[str, ...]:
    """Splits `a:1,b:2` into its addresses; takes any gRPC name as one (`dns:///name:1`).

    Raises:
        ValueError: there is none, or one is empty.
    """
    if isinstance(targets, str):
        # These names of gRPC hold commas themselves.
        is_one_name = targets.startswith(("ipv4:", "ipv6:"))
        targets = [targets] if is_one_name else targets.split(",")
    found = tuple(target.strip() for target in targets)
    if not found or not all(found):
        raise ValueError(f"{targets!r} is no list of addresses HOST:PORT")
    return found


def token_metadata(
    token: str | None, targets: Sequence[str], tls: TlsOptions | None, *, allow_plaintext: bool
) -> tuple[tuple[str, str], ...]:
    """The metadata of calls that carry a bearer token; none without a token.

    Raises:
        ValueError: the token is no token, or would cross a network in plaintext.
    """
    if token is None:
        return ()
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError("the token must be of printable ASCII characters, without spaces")
    if tls is None and not allow_plaintext:
        for target in targets:
            if not _is_loopback(target):
                raise ValueError(
                    f"the token would go to {target} in plaintext: use TLS, or allow it explicitly"
                )
    return (("authorization", f"Bearer {token}"),)


def may_have_several(targets: Sequence[str]) -> bool:
    """Whether these may be more than one server: several targets, or a name."""
    if len(targets) > 1:
        return True
    host = targets[0].rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def open_channel(
    target: str, tls: TlsOptions | None, *, round_robin: bool = False, resumes: bool = False
) -> grpc.Channel:
    """A channel for blocking calls; None speaks plaintext. The caller closes it.

    Args:
        target: HOST:PORT or any gRPC name.
        tls: None speaks plaintext.
        round_robin: whether the calls are spread over all addresses of the name.
        resumes: whether a call that is cut off goes on elsewhere: a server that vanished is noticed
            soon, and a slow link is taken for one.
    """
    options = _options(target, round_robin=round_robin, resumes=resumes)
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    return RenewedChannel(
        _files(tls),
        lambda: grpc.secure_channel(target, tls.credentials(), options=options),
        check=lambda: _check(tls),
    )


def open_async_channel(
    target: str, tls: TlsOptions | None, *, round_robin: bool = False, resumes: bool = False
) -> grpc.aio.Channel:
    """A channel of the running event loop; see `open_channel`."""
    options = _options(target, round_robin=round_robin, resumes=resumes)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return RenewedAsyncChannel(
        _files(tls),
        lambda: grpc.aio.secure_channel(target, tls.credentials(), options=options),
        check=lambda: _check(tls),
    )


def _files(tls: TlsOptions) -> Sequence[Path]:
    return [path for path in (tls.ca, tls.certificate, tls.key) if path is not None]


def _options(target: str, *, round_robin: bool, resumes: bool) -> list[tuple[str, int | str]]:
    """The channel's settings; to this machine it never uses the environment's proxy."""
    interval_ms, timeout_ms = SHORT_KEEPALIVE_MS if resumes else _KEEPALIVE_MS
    options: list[tuple[str, int | str]] = [
        *_CHANNEL_OPTIONS,
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    ]
    options.append(("grpc.enable_http_proxy", int(not _is_loopback(target))))
    if round_robin:
        options.append(_ROUND_ROBIN)
    return options


def _is_loopback(target: str) -> bool:
    """Whether a gRPC name can only be on this machine."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]  # dns://name server/name
    return all(is_loopback_host(address.rpartition(":")[0]) for address in target.split(","))


def is_loopback_host(host: str) -> bool:
    """Whether a name or an address, an IPv6 one with or without brackets, is this machine's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False  # a name, which may be any machine's
