"""TLS and mTLS credentials from files, and when a certificate expires.

Owns the rule of when plaintext is allowed: on loopback, or where a flag says so. Knows nothing
of how files get there or who signs them. `cryptography` reads our own certificates and keys; `ssl`
reads authorities, because system bundles hold old ones that `cryptography` is going to refuse.
`cryptography` is imported where a file is read: it takes 8 MB and some 50 ms, and most processes on
one machine speak plaintext.
"""

import ssl
from pathlib import Path

import grpc

from servicekit.address import is_loopback_target, parse_address
from servicekit.config import ChannelOptions, ConfigError, ServerOptions


def server_credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """The main port's credentials: TLS, mTLS with `--tls-client-ca`, or None for plaintext.

    Raises:
        ConfigError: a file is missing or invalid, half of a pair is missing, or the address is not
            loopback and `--allow-plaintext` is not given.
    """
    if options.tls_cert is None and options.tls_key is None:
        if options.tls_client_ca is not None:
            raise ConfigError("--tls-client-ca", "needs --tls-cert and --tls-key")
        check_plaintext(options, "--listen", options.listen)
        return None
    cert, key = _key_pair(options.tls_cert, "--tls-cert", options.tls_key, "--tls-key")
    if options.tls_client_ca is None:
        return grpc.ssl_server_credentials([(key, cert)])
    client_ca = _authorities(options.tls_client_ca, "--tls-client-ca")
    return grpc.ssl_server_credentials(
        [(key, cert)], root_certificates=client_ca, require_client_auth=True
    )


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
        ConfigError: as `server_credentials`, for the target.
    """
    if options.peer_tls_ca is None:
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
        return None
    ca = _authorities(options.peer_tls_ca, "--peer-tls-ca")
    if options.peer_tls_cert is None and options.peer_tls_key is None:
        return grpc.ssl_channel_credentials(root_certificates=ca)
    cert, key = _key_pair(
        options.peer_tls_cert, "--peer-tls-cert", options.peer_tls_key, "--peer-tls-key"
    )
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=cert
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
    if private_key.public_key() != certificate.public_key():
        raise ConfigError(key_flag, f"{key} is not the key of {cert}")
    return cert_bytes, key_bytes


def _authorities(path: Path, flag: str) -> bytes:
    content = _read(path, flag)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(flag, f"{path} holds no certificate in PEM form") from None
    return content


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror}") from None
