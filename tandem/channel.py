"""How a client reaches a server: TLS, and a channel's settings.

Owns the channel arguments that every client here should have. Knows no service.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc

_CHANNEL_OPTIONS = (
    # Notices a server that is gone without a word, while a call is open.
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

    # Certificates to trust. None: the system's.
    ca: Path | None = None
    # Our own certificate and key, for a server that wants mTLS: both or none.
    certificate: Path | None = None
    key: Path | None = None

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
    """The channel's settings; a proxy from the environment is never asked for this machine."""
    return (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not target.startswith(_LOOPBACK))))
