"""The flags that say which gateway a command calls, and as whom.

Owns their names, the default address, the reading of the token, and what is said of a gateway that
cannot be called.
"""

import functools
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.ports import DEFAULT_GRPC_PORT
from tandem.generation import TandemError
from tandem.transport.channel import TlsOptions, load_own_certificate, parse_targets

DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_GRPC_PORT}"
TOKEN_VARIABLE = "TANDEM_TOKEN"

# What to look at where a gateway is not reached. Not all that TLS lacks is told by the reason: of a
# client without the certificate that the gateway asks for, only that the connection was closed.
UNREACHED_ADVICE = (
    "check the address, that it runs, and what it asks of --tls, --tls-ca, --tls-cert"
)

_HOST_AND_PORT = re.compile(r"(\[[^\[\]/]+\]|[^\[\]:/\s]+):\d{1,5}")
# Names that only gRPC understands.
_GRPC_NAME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):.")
# What gRPC itself says of a server that it does not reach; the reason is in the group.
_UNREACHED = (
    re.compile(r"connections to all backends failing; last error: [A-Z_]+: \w+:\S+: (.*)"),
    re.compile(r"errors resolving \S+: \[(?:field:)?(?:hostname lookup error:)?(.*)\]"),
)


def reason_unreached(error: TandemError) -> str | None:
    """Why a gateway is not reached, in gRPC's words; None: the error is another."""
    found = (pattern.fullmatch(error.message) for pattern in _UNREACHED)
    return next((each[1] for each in found if each), None)


def _flag(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Connection", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags:
    """Addresses, token and TLS of a gateway's gRPC."""

    named_target: Annotated[
        str | None,
        _flag(
            "--target",
            metavar="HOST:PORT",
            help=f"the gateway, or several, separated by commas (default: {DEFAULT_TARGET})",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        _flag(
            metavar="FILE",
            help=f"bearer token for the gateway (default: the variable {TOKEN_VARIABLE}, if set)",
        ),
    ] = None
    allow_plaintext_token: Annotated[
        bool,
        _flag("--allow-plaintext-token", help="send the token without TLS to other machines, too"),
    ] = False
    tls: Annotated[bool, _flag("--tls", help="speak TLS; implied by the others")] = False
    tls_ca: Annotated[Path | None, _flag(metavar="FILE", help="certificates to trust (PEM)")] = None
    tls_cert: Annotated[Path | None, _flag(metavar="FILE", help="own certificate (PEM)")] = None
    tls_key: Annotated[Path | None, _flag(metavar="FILE", help="its key (PEM)")] = None

    @property
    def target(self) -> str:
        """The gateways to call."""
        return DEFAULT_TARGET if self.named_target is None else self.named_target

    def check(self) -> None:
        """Refuses what could not be used in any call.

        Raises:
            typer.BadParameter: an address is none, or a file cannot be read; names the flag.
        """
        try:
            for address in parse_targets(self.target):
                if not (_HOST_AND_PORT.fullmatch(address) or _GRPC_NAME.match(address)):
                    raise ValueError(f"{address!r} is no HOST:PORT")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--target") from None
        for flag, file in (
            ("--tls-ca", self.tls_ca),
            ("--tls-cert", self.tls_cert),
            ("--tls-key", self.tls_key),
        ):
            try:
                if file is not None:
                    file.read_bytes()
            except OSError as error:
                raise typer.BadParameter(f"{file}: {error.strerror}", param_hint=flag) from None
        try:
            self.token()
        except OSError as error:
            raise typer.BadParameter(
                f"{self.token_file}: {error.strerror}", param_hint="--token-file"
            ) from None
        except ValueError:
            raise typer.BadParameter(
                f"{self.token_file} holds no text", param_hint="--token-file"
            ) from None
        self._check_certificates()

    def _check_certificates(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise typer.BadParameter("belongs together with --tls-key", param_hint="--tls-cert")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.tls_ca is not None:
                context.load_verify_locations(self.tls_ca)
        except ssl.SSLError:
            raise typer.BadParameter(
                f"{self.tls_ca} holds no certificate", param_hint="--tls-ca"
            ) from None
        try:
            if self.tls_cert is not None:
                load_own_certificate(context, self.tls_cert, self.tls_key)
        except ssl.SSLError as error:
            raise typer.BadParameter(
                f"{self.tls_cert}, with {self.tls_key}: {error.reason or error}",
                param_hint="--tls-cert",
            ) from None
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--tls-key") from None

    def describe(self, error: TandemError) -> str:
        """What failed, in one line; of a gateway that is not reached, what to do."""
        if (reason := reason_unreached(error)) is None:
            return f"{error} ({error.code.name})"
        return (
            f"{self.target}: {reason} ({error.code.name}); {UNREACHED_ADVICE}; "
            f"tandem doctor --target {self.target} says more"
        )

    def tls_options(self) -> TlsOptions | None:
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        if not self.tls and not any(files):
            return None
        return TlsOptions(ca=files[0], certificate=files[1], key=files[2])

    def token(self) -> str | None:
        """The token of the file, else that of the environment.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not UTF-8.
        """
        if self.token_file is not None:
            return self.token_of_file()
        return os.environ.get(TOKEN_VARIABLE, "").strip() or None

    def token_of_file(self) -> str | None:
        """The token that a flag names: what a server may get that is no gateway.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not UTF-8.
        """
        return None if self.token_file is None else _text_of(self.token_file)


@functools.cache
def _text_of(file: Path) -> str:
    """Read once: it may be a pipe."""
    return file.read_text().strip()
