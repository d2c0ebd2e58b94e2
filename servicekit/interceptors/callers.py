"""Who makes a call, as far as its transport and its metadata say.

Owns the names in a caller's verified certificate, and its bearer token. Does not know who may call.
"""

import dataclasses
from collections.abc import Sequence

from servicekit.interceptors.base import Context

_TOKEN_KEY = "authorization"
_SCHEME = "bearer "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call.

    Attributes:
        certificate_names: of its verified certificate: the DNS names and URIs; the common name, if
            it has no alternative name at all. Empty without a certificate.
        token: of `authorization: Bearer TOKEN`; None without that metadata, "" if it has another
            form or comes twice, which is the token of nobody.
    """

    certificate_names: tuple[str, ...] = ()
    token: str | None = dataclasses.field(default=None, repr=False)


def caller_of(context: Context) -> Caller:
    """The caller of a call."""
    given = [value for key, value in context.invocation_metadata() or () if key == _TOKEN_KEY]
    texts = [value if isinstance(value, str) else "" for value in given]
    return Caller(certificate_names=_certificate_names(context), token=bearer_token(texts))


def bearer_token(given: Sequence[str]) -> str | None:
    """The token of the values of `authorization`; see `Caller`."""
    if not given:
        return None
    if len(given) > 1 or not given[0].lower().startswith(_SCHEME):
        return ""
    return given[0][len(_SCHEME) :].strip()


def _certificate_names(context: Context) -> tuple[str, ...]:
    # gRPC has verified the certificate: without mTLS there is no such property.
    properties = context.auth_context()
    names = [*properties.get("peer_dns", ()), *properties.get("peer_uri", ())]
    if not properties.get("x509_subject_alternative_name"):
        names += properties.get("x509_common_name", ())
    return tuple(name.decode(errors="replace") for name in names)
