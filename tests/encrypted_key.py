"""A key with a passphrase, which no service and no client of Tandem can use."""

import trustme
from cryptography.hazmat.primitives import serialization


def encrypted_key(certificate: trustme.LeafCert) -> bytes:
    """The key of a certificate with a passphrase, in PEM form."""
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), password=None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
