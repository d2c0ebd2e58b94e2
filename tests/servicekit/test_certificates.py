"""When certificates expire, and the metric that says it."""

import datetime

import pytest
import trustme
from cryptography import x509

from servicekit.channels.tls import first_expiry

UTC = datetime.UTC


def chain_of(certificate: trustme.LeafCert) -> bytes:
    return b"".join(pem.bytes() for pem in certificate.cert_chain_pems)


# Dates up to 2049 and later ones are written in two different ways.
@pytest.mark.parametrize("year", [2027, 2049, 2050, 2099])
@pytest.mark.parametrize("key_type", [trustme.KeyType.RSA, trustme.KeyType.ECDSA])
def test_the_expiry_is_the_certificates_own(year: int, key_type: trustme.KeyType) -> None:
    not_after = datetime.datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    certificate = trustme.CA(key_type=key_type).issue_cert(
        "127.0.0.1", "a-rather-long-name." * 8 + "test", not_after=not_after
    )
    assert first_expiry(chain_of(certificate)) == not_after.timestamp()


def test_a_chain_expires_with_its_first_certificate() -> None:
    authority = trustme.CA().create_child_ca()
    certificate = authority.issue_cert(
        "server.test", not_after=datetime.datetime(2098, 1, 1, tzinfo=UTC)
    )
    chain = chain_of(certificate)
    expected = [
        found.not_valid_after_utc.timestamp() for found in x509.load_pem_x509_certificates(chain)
    ]
    assert len(expected) == 2
    assert first_expiry(chain) == min(expected)
    backwards = b"".join(pem.bytes() for pem in reversed(certificate.cert_chain_pems))
    assert first_expiry(b"What this is:\n" + backwards) == min(expected)


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"not a certificate",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_is_no_certificate_is_a_value_error(pem: bytes) -> None:
    with pytest.raises(ValueError, match=r"PEM|asn1"):
        first_expiry(pem)
