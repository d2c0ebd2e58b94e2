"""Certificates that trustme does not issue."""

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key


def issue_uri_cert(authority: trustme.CA, uri: str) -> trustme.LeafCert:
    """A certificate whose only name is a URI, as SPIFFE has it."""
    leaf = authority.issue_cert("replaced.test")
    given = x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes())
    builder = x509.CertificateBuilder(
        issuer_name=given.issuer,
        subject_name=given.subject,
        public_key=given.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=given.not_valid_before_utc,
        not_valid_after=given.not_valid_after_utc,
        extensions=[
            each
            for each in given.extensions
            if not isinstance(each.value, x509.SubjectAlternativeName)
        ],
    ).add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True
    )
    key = load_pem_private_key(authority.private_key_pem.bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    signed = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return trustme.LeafCert(leaf.private_key_pem.bytes(), signed, [])
