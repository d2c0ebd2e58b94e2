"""The flags that say which gateway a command calls, and as whom.

Owns their names, the default address, and the reading of the token.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.channel import TlsOptions
from tandem.cli.ports import DEFAULT_GRPC_PORT

DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_GRPC_PORT}"
TOKEN_VARIABLE = "TANDEM_TOKEN"


def _flag(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Connection", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags:
    """Addresses, token and TLS of a gateway's gRPC."""

    target: Annotated[
        str, _flag(metavar="HOST:PORT", help="the gateway, or several, separated by commas")
    ] = DEFAULT_TARGET
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
            return self.token_file.read_text().strip()
        return os.environ.get(TOKEN_VARIABLE) or None
