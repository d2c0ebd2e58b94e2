"""When certificates stop being valid.

Owns the reading of one field of X.509 (RFC 5280, section 4.1): `ssl` checks certificates, but tells
of the dates only of a peer's. Knows no files and no flags, and trusts its input: it is what `ssl`
has loaded before.
"""

import datetime
import re
import ssl

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

_UTC_TIME = 0x17
_EXPLICIT_VERSION = 0xA0


def first_expiry(pem: bytes) -> float:
    """When the first of the certificates in a PEM file ceases to be valid, in Unix seconds.

    The chain counts as a whole: peers refuse it as soon as one of its certificates has expired.

    Raises:
        ValueError: there is no certificate, or one that cannot be read.
    """
    try:
        return min(
            _not_after(ssl.PEM_cert_to_DER_cert(certificate))
            for certificate in _PEM.findall(pem.decode("ascii"))
        )
    except (IndexError, ValueError):
        raise ValueError("there is no certificate, or one that cannot be read") from None


def _not_after(der: bytes) -> float:
    #   Certificate     ::= SEQUENCE { tbsCertificate, ... }
    #   TBSCertificate  ::= SEQUENCE { version [0] (may be absent), serialNumber, signature,
    #                                  issuer, validity SEQUENCE { notBefore, notAfter }, ... }
    position, _ = _content(der, 0)
    position, _ = _content(der, position)
    if der[position] == _EXPLICIT_VERSION:
        position = _next(der, position)
    for _ in ("serialNumber", "signature", "issuer"):
        position = _next(der, position)
    not_before, _ = _content(der, position)
    not_after = _next(der, not_before)
    start, end = _content(der, not_after)
    text = der[start:end].decode("ascii")
    if der[not_after] == _UTC_TIME:  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.datetime.strptime(f"{text[:-1]}+0000", "%Y%m%d%H%M%S%z").timestamp()


def _content(der: bytes, position: int) -> tuple[int, int]:
    """The content [start, end) of the element at a position."""
    length = der[position + 1]
    start = position + 2
    if length >= 0x80:  # long form: so many bytes of length follow
        num_bytes = length - 0x80
        length = int.from_bytes(der[start : start + num_bytes])
        start += num_bytes
    return start, start + length


def _next(der: bytes, position: int) -> int:
    """Where the element behind the one at a position begins."""
    return _content(der, position)[1]
