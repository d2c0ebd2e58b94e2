"""Client channels: TLS, and the settings that every client shares. Knows no service."""

from dataclasses import dataclass
from pathlib import Path

import grpc

_CHANNEL_OPTIONS = (
    # While a call is open, notices a server that vanished without closing the connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.primary_user_agent", "tandem-client"),
)
_LOOPBACK = ("127.", "localhost", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """How to reach a server that speaks TLS. Files are PEM."""

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


def open_channel(target: str, tls: TlsOptions | None) -> grpc.Channel:
    """A channel for blocking calls; None speaks plaintext. The caller closes it."""
    if tls is None:
        return grpc.insecure_channel(target, options=_options(target))
    return grpc.secure_channel(target, tls.credentials(), options=_options(target))


def open_async_channel(target: str, tls: TlsOptions | None) -> grpc.aio.Channel:
    """A channel of the running event loop; None speaks plaintext. The caller closes it."""
    if tls is None:
        return grpc.aio.insecure_channel(target, options=_options(target))
    return grpc.aio.secure_channel(target, tls.credentials(), options=_options(target))


def _options(target: str) -> tuple[tuple[str, int | str], ...]:
    """The channel's settings; to this machine it never uses the environment's proxy."""
    return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not target.startswith(_LOOPBACK))))
