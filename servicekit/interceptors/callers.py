"""Who makes a call, as far as its transport and its metadata say.

Owns the names in a caller's verified certificate, and its bearer token. Does not know who may call.
"""

import dataclasses

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
    return Caller(certificate_names=_certificate_names(context), token=_token(context))


def _certificate_names(context: Context) -> tuple[str, ...]:
    # gRPC has verified the certificate: without mTLS there is no such property.
    properties = context.auth_context()
    names = [*properties.get("peer_dns", ()), *properties.get("peer_uri", ())]
    if not properties.get("x509_subject_alternative_name"):
        names += properties.get("x509_common_name", ())
    return tuple(name.decode(errors="replace") for name in names)


def _token(context: Context) -> str | None:
    given = [value for key, value in context.invocation_metadata() or () if key == _TOKEN_KEY]
    if not given:
        return None
    value = given[0]
    if len(given) > 1 or not isinstance(value, str) or not value.lower().startswith(_SCHEME):
        return ""
    return value[len(_SCHEME) :].strip()
