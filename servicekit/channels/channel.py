"""Client channels that notice a dead peer, reconnect when it returns, and renew their certificate.

Owns the channel arguments that all clients of services share. Knows no service.
Argument names: https://grpc.github.io/grpc/core/group__grpc__arg__keys.html
"""

import functools

import grpc

from servicekit.address import Address, parse_address
from servicekit.channels.limits import KEEPALIVE, MAX_RECEIVE_BYTES
from servicekit.channels.renewed_channel import RenewedChannel
from servicekit.channels.tls import check_peer_plaintext, peer_files, tls_credentials
from servicekit.channels.watched_files import WatchedFiles
from servicekit.config import ChannelOptions

# How long one attempt to connect may take, and how the pauses between attempts grow: a restarted
# peer is found within seconds, and an absent one does not get many attempts.
_CONNECT_TIMEOUT_MS = 5_000
_INITIAL_BACKOFF_MS = 200
_MAX_BACKOFF_MS = 3_000


def open_channel(
    target: str,
    options: ChannelOptions,
    *,
    server_name: str | None = None,
    user_agent: str | None = None,
) -> grpc.aio.Channel:
    """Opens a channel; it connects when first used. The caller closes it.

    Args:
        target: HOST:PORT or any gRPC name (`dns:///...`, `unix:...`).
        options: the TLS files; plaintext only to loopback unless they say otherwise.
        server_name: the DNS name that the target's address was found by: its certificate must have
            that name. None: it must have the target's own host.
        user_agent: stands before gRPC's own.

    Raises:
        ConfigError: see `tls.channel_credentials`.
    """
    arguments: list[tuple[str, int | str]] = [
        *KEEPALIVE,
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
        ("grpc.initial_reconnect_backoff_ms", _INITIAL_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
        # A new channel gets a connection of its own, without another channel's backoff and load.
        ("grpc.use_local_subchannel_pool", 1),
        # The environment's HTTP proxy is meant for the internet, not for services.
        ("grpc.enable_http_proxy", 0),
    ]
    if server_name is not None:
        # As if gRPC itself had resolved the name: the certificate is checked for the authority.
        authority = Address(host=server_name, port=parse_address(target).port)
        arguments.append(("grpc.default_authority", str(authority)))
    if user_agent is not None:
        arguments.append(("grpc.primary_user_agent", user_agent))
    if options.peer_tls_ca is None:
        check_peer_plaintext(target, options)
        return grpc.aio.insecure_channel(target, options=arguments)
    files = WatchedFiles(
        peer_files(options),
        functools.partial(tls_credentials, options),
        # The process reports it once, for all its channels: `Server.watch_peer_certificate`.
        on_reload=lambda _error: None,
    )
    return RenewedChannel(
        files, lambda held: grpc.aio.secure_channel(target, held, options=arguments)
    )
