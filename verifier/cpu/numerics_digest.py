"""A digest that two verifiers share if they continue a sequence with the same tokens.

What decides bits, given equal weights (the model's digest covers these): how they are stored; the
kernels' sources, since every sum has one order, whatever the processor's tiles, threads or batch,
and the compiler may not change it; sampling, likewise; and the C library's sines, cosines, powers
and logarithms, in rotary embeddings and noise. Versions of numba or numpy decide nothing.
"""

import hashlib
import platform

from verifier.cpu.parity import sources_digest
from verifier.cpu.weights import DecoderWeights


def numerics_digest(weights: DecoderWeights) -> str:
    """The digest of a decoder in this process."""
    digest = hashlib.sha256()
    for part in (
        "own decoder",
        weights.linear_type.name,
        weights.other_type.name,
        sources_digest("sampling"),
        platform.machine(),
        *platform.libc_ver(),
    ):
        digest.update(f"{part}\n".encode())
    for rotary in weights.rotaries:
        digest.update(rotary.inv_freq.tobytes())
        digest.update(repr(rotary.scaling).encode())
    return digest.hexdigest()
