"""TLS of the connections that are not gRPC's: which authorities they accept."""

import ssl
from pathlib import Path


def tls_context(ca: Path | None) -> ssl.SSLContext:
    """For a client. As in gRPC, an authority needs no more extensions than `openssl req -x509`
    makes; Python 3.13 and newer would ask for more.

    Args:
        ca: certificates to trust; None trusts the system's.

    Raises:
        OSError: the file cannot be read, or holds no certificate.
    """
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
