"""From a client's credentials to its principal.

Owns who is whom. Knows no transport: every API hands over a token, and the names in the client's
verified certificate.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

from gateway.errors import UnauthenticatedError
from gateway.requests.clients_file import KnownClient, KnownClients
from gateway.requests.principal import ANONYMOUS, Principal


class Authenticator:
    """Knows the clients of a file, or takes everybody for the one anonymous client."""

    def __init__(
        self,
        clients: Callable[[], KnownClients] | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        clients: returns the clients as they are now; None: clients are not authenticated.
        clock: returns Unix seconds.
        """
        self._clients = clients
        self._clock = clock

    def authenticate(self, *, token: str | None, certificate_names: Sequence[str]) -> Principal:
        """The principal of these credentials.

        Args:
            token: None: none was sent. A token counts alone: a wrong one is not made good by a
                certificate.
            certificate_names: of the client's verified certificate.

        Raises:
            UnauthenticatedError: they are missing, wrong or expired; it does not say which.
        """
        if self._clients is None:
            return ANONYMOUS
        client = _find(self._clients(), token, certificate_names)
        if client is None or (client.expires_s is not None and client.expires_s <= self._clock()):
            raise UnauthenticatedError("valid credentials are required")
        return client.principal


def _find(
    clients: KnownClients, token: str | None, certificate_names: Sequence[str]
) -> KnownClient | None:
    if token is not None:
        # Looked up by digest, which a guesser cannot steer towards a known one: how long the
        # look-up takes tells nothing about any token.
        return clients.by_token.get(hashlib.sha256(token.encode(errors="replace")).digest())
    for name in certificate_names:
        if name in clients.by_certificate:
            return clients.by_certificate[name]
    return None
