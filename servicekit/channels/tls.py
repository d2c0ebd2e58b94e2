"""TLS and mTLS credentials from files, read again when they change, and when they expire.

Owns the rule of when plaintext is allowed: on loopback, or where a flag says so. Knows nothing
of how files get there or who signs them. `cryptography` reads our own certificates and keys; `ssl`
reads authorities, because system bundles hold old ones that `cryptography` is going to refuse.
`cryptography` is imported where a file is read: it takes 8 MB and some 50 ms, and most processes on
one machine speak plaintext.
"""

import dataclasses
import functools
import math
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from servicekit.address import is_loopback_target, parse_address
from servicekit.channels.watched_files import WatchedFiles
from servicekit.config import ChannelOptions, ConfigError, ServerOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """What a server's files hold, all PEM.

    Attributes:
        chain: its certificate and those between it and the authority.
        client_ca: the authorities of clients' certificates; None: clients need none.
        expires_s: when the first certificate of the chain expires, in Unix seconds.
        context: the same for HTTP.
    """

    chain: bytes
    key: bytes = dataclasses.field(repr=False)
    client_ca: bytes | None
    expires_s: float
    context: ssl.SSLContext = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelCertificate:
    """What the files of channels hold, all PEM.

    Attributes:
        authorities: those of the certificates of the services to call.
        chain, key: for services that ask for a certificate; None: there is none.
        expires_s: when the first certificate of the chain expires, in Unix seconds.
    """

    authorities: bytes
    chain: bytes | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)
    expires_s: float = math.inf


def watch_server_certificate(
    options: ServerOptions, *, on_reload: Callable[[ConfigError | None], None]
) -> WatchedFiles[ServerCertificate] | None:
    """The main port's certificate, read again when its files change; None for plaintext.

    Raises:
        ConfigError: an option lacks another one that it needs, or the address is not loopback and
            `--allow-plaintext` is not given; or see `read_server_certificate`.
    """
    if options.tls_cert is None and options.tls_key is None:
        if options.tls_client_ca is not None:
            raise ConfigError("--tls-client-ca", "needs --tls-cert and --tls-key")
        if options.allowed_clients:
            raise ConfigError("--allowed-clients", "needs --tls-client-ca")
        check_plaintext(options, "--listen", options.listen)
        return None
    paths = (options.tls_cert, options.tls_key, options.tls_client_ca)
    read = functools.partial(read_server_certificate, options)
    return WatchedFiles([path for path in paths if path], read, on_reload=on_reload)


def read_server_certificate(options: ServerOptions) -> ServerCertificate:
    """The files of the main port over TLS, or over mTLS with `--tls-client-ca`.

    Raises:
        ConfigError: a file is missing or invalid, the certificate has expired, half of a pair is
            missing, or there are `--allowed-clients` without `--tls-client-ca`.
    """
    chain, key = _key_pair(options.tls_cert, "--tls-cert", options.tls_key, "--tls-key")
    client_ca = None
    if options.tls_client_ca is not None:
        client_ca = _authorities(options.tls_client_ca, "--tls-client-ca")
    elif options.allowed_clients:
        raise ConfigError("--allowed-clients", "needs --tls-client-ca")
    return ServerCertificate(
        chain=chain,
        key=key,
        client_ca=client_ca,
        expires_s=first_expiry(chain),
        context=_make_context(options),
    )


def server_credentials(certificate: WatchedFiles[ServerCertificate]) -> grpc.ServerCredentials:
    """Credentials of a gRPC server; each handshake looks whether the certificate has changed."""
    used = certificate.value

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        certificate.refresh()
        latest = certificate.value
        if latest is used:
            return None
        used = latest
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        changed,  # type: ignore[arg-type]  # None, for "no change", is missing in the stubs
        require_client_authentication=used.client_ca is not None,
    )


def server_context(certificate: WatchedFiles[ServerCertificate]) -> ssl.SSLContext:
    """The same for HTTP; each handshake looks whether the certificate has changed."""
    outer = certificate.value.context

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        certificate.refresh()
        connection.context = certificate.value.context

    outer.sni_callback = choose
    return outer


def check_plaintext(options: ServerOptions, flag: str, listen: str) -> None:
    """Checks that a port without a certificate may speak plaintext.

    Args:
        options: the server's.
        flag: the flag of the address.
        listen: the address.

    Raises:
        ConfigError: the address is not loopback and `--allow-plaintext` is not given.
    """
    if not options.allow_plaintext and not parse_address(listen).is_loopback:
        raise ConfigError(
            flag,
            f"{listen} is not loopback: give --tls-cert and --tls-key, or --allow-plaintext",
        )


def channel_credentials(target: str, options: ChannelOptions) -> grpc.ChannelCredentials | None:
    """The credentials of a channel: TLS with `--peer-tls-ca`, or None for plaintext.

    Raises:
        ConfigError: see `check_peer_plaintext` and `read_channel_certificate`.
    """
    if options.peer_tls_ca is None:
        check_peer_plaintext(target, options)
        return None
    return tls_credentials(options)


def check_peer_plaintext(target: str, options: ChannelOptions) -> None:
    """Checks that a channel without `--peer-tls-ca` may speak plaintext.

    Raises:
        ConfigError: there is a certificate for TLS, or the target is not loopback and
            `--peer-allow-plaintext` is not given.
    """
    for path, flag in (
        (options.peer_tls_cert, "--peer-tls-cert"),
        (options.peer_tls_key, "--peer-tls-key"),
    ):
        if path is not None:
            raise ConfigError(flag, "needs --peer-tls-ca")
    if not options.peer_allow_plaintext and not is_loopback_target(target):
        raise ConfigError(
            "--peer-tls-ca",
            f"{target} is not loopback: give --peer-tls-ca, or --peer-allow-plaintext",
        )


def tls_credentials(options: ChannelOptions) -> grpc.ChannelCredentials:
    """The credentials of channels over TLS: `--peer-tls-ca` is given.

    Raises:
        ConfigError: see `read_channel_certificate`.
    """
    held = read_channel_certificate(options)
    return grpc.ssl_channel_credentials(
        root_certificates=held.authorities, private_key=held.key, certificate_chain=held.chain
    )


def read_channel_certificate(options: ChannelOptions) -> ChannelCertificate:
    """The files of channels over TLS: `--peer-tls-ca` is given.

    Raises:
        ConfigError: a file is missing or invalid, the certificate has expired, or half of a pair is
            missing.
    """
    assert options.peer_tls_ca is not None, "the caller has checked"
    authorities = _authorities(options.peer_tls_ca, "--peer-tls-ca")
    if options.peer_tls_cert is None and options.peer_tls_key is None:
        return ChannelCertificate(authorities=authorities)
    chain, key = _key_pair(
        options.peer_tls_cert, "--peer-tls-cert", options.peer_tls_key, "--peer-tls-key"
    )
    return ChannelCertificate(
        authorities=authorities, chain=chain, key=key, expires_s=first_expiry(chain)
    )


def first_expiry(pem: bytes) -> float:
    """When the first certificate of a chain expires, in Unix seconds.

    Peers refuse a chain as soon as one of its certificates has expired.

    Raises:
        ValueError: there is no certificate, or one that cannot be read.
    """
    from cryptography import x509

    return min(
        certificate.not_valid_after_utc.timestamp()
        for certificate in x509.load_pem_x509_certificates(pem)
    )


def peer_files(options: ChannelOptions) -> Sequence[Path]:
    """The files that `channel_credentials` reads; none for plaintext."""
    paths = (options.peer_tls_ca, options.peer_tls_cert, options.peer_tls_key)
    return [path for path in paths if path is not None]


def _configuration(certificate: ServerCertificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificate.key, certificate.chain)], root_certificates=certificate.client_ca
    )


def _make_context(options: ServerOptions) -> ssl.SSLContext:
    assert options.tls_cert is not None, "the certificate was read"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:  # ssl.SSLError is one: OpenSSL refuses what it holds for too weak
        raise ConfigError("--tls-cert", f"{options.tls_cert}: {error.strerror}") from None
    if options.tls_client_ca is not None:
        context.load_verify_locations(options.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # The cache of TLS 1.2's sessions cannot be switched off from here.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A resumed session would not show the client's certificate to new authorities.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    return context


def _key_pair(
    cert: Path | None, cert_flag: str, key: Path | None, key_flag: str
) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if cert is None:
        raise ConfigError(key_flag, f"needs {cert_flag}")
    if key is None:
        raise ConfigError(cert_flag, f"needs {key_flag}")
    cert_bytes, key_bytes = _read(cert, cert_flag), _read(key, key_flag)
    # gRPC itself accepts any bytes, and then every handshake fails without a reason.
    try:
        certificate = x509.load_pem_x509_certificates(cert_bytes)[0]
    except ValueError:
        raise ConfigError(cert_flag, f"{cert} holds no certificate in PEM form") from None
    try:
        private_key = load_pem_private_key(key_bytes, password=None)
    except TypeError:
        raise ConfigError(key_flag, f"{key} is encrypted; give a key without passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(key_flag, f"{key} holds no private key in PEM form") from None
    try:
        public_key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(cert_flag, f"{cert} has a key of an unknown kind") from None
    if private_key.public_key() != public_key:
        raise ConfigError(key_flag, f"{key} is not the key of {cert}")
    # Peers would refuse it in every handshake, also without a reason.
    if first_expiry(cert_bytes) <= time.time():
        raise ConfigError(cert_flag, f"{cert} has expired")
    return cert_bytes, key_bytes


def _authorities(path: Path, flag: str) -> bytes:
    content = _read(path, flag)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Comments may be in any script; within a certificate, "?" is an error as the byte itself is.
    text = content.decode("ascii", errors="replace").replace("\ufffd", "?")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise ConfigError(flag, f"{path} holds no certificate in PEM form") from None
    return content


def _read(path: Path, flag: str) -> bytes:
    try:
        # It is read more than once: a pipe has its content once, and waits for a writer.
        if path.exists() and not path.is_file():
            raise ConfigError(flag, f"{path}: is no regular file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror}") from None
