"""What a request over HTTP may know of its connection."""

import dataclasses
from collections.abc import Callable

from starlette.types import Receive


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What a request may know of its connection: `request.state.connection`.

    Attributes:
        abort: closes it at once and drops what the client has not read.
        is_gone: whether it is closed, or its client has ended it: see `has_ended`.
        is_last: whether an answer that begins now must be the connection's last: more of the
            request's body may come than is read after an answer.
        certificate_names: of the client's verified certificate: the DNS names and URIs; the common
            name, if it has no alternative name at all. Empty without a certificate.
    """

    abort: Callable[[], None]
    is_gone: Callable[[], bool]
    is_last: Callable[[], bool]
    certificate_names: tuple[str, ...]

    async def cut_off(self, receive: Receive) -> None:
        """Closes it at once, and returns when its request has no client any more."""
        self.abort()
        while (await receive())["type"] != "http.disconnect":
            pass
