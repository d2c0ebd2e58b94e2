"""From a client's credentials to its principal.

Owns who is whom. Knows no transport: every API hands over its caller.
"""

import hashlib
import time
from collections.abc import Callable

from gateway.errors import UnauthenticatedError
from gateway.requests.clients_file import KnownClient, KnownClients
from gateway.requests.principal import ANONYMOUS, Principal
from servicekit.interceptors.callers import Caller


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

    def authenticate(self, caller: Caller) -> Principal:
        """The principal of a caller. A token counts alone: a wrong one is not made good by a
        certificate.

        Raises:
            UnauthenticatedError: they are missing, wrong or expired; it does not say which.
        """
        if self._clients is None:
            return ANONYMOUS
        client = _find(self._clients(), caller)
        if client is None or (client.expires_s is not None and client.expires_s <= self._clock()):
            raise UnauthenticatedError("valid credentials are required")
        return client.principal


def _find(clients: KnownClients, caller: Caller) -> KnownClient | None:
    if caller.token is not None:
        # Looked up by digest, which a guesser cannot steer towards a known one: how long the
        # look-up takes tells nothing about any token.
        return clients.by_token.get(hashlib.sha256(caller.token.encode(errors="replace")).digest())
    for name in caller.certificate_names:
        if name in clients.by_certificate:
            return clients.by_certificate[name]
    return None
