"""A digest that two verifiers share if they continue a sequence with the same tokens.

What decides bits, given equal weights (the model's digest covers these): how they are stored; the
kernels' sources, since every sum has one order, whatever the processor's tiles, threads or batch,
and the compiler may not change it; sampling, likewise; and the C library's sines, cosines, powers
and logarithms, in rotary embeddings and noise. Versions of numba or numpy decide nothing.
"""

import hashlib
import platform
from pathlib import Path

from verifier.cpu.weights import DecoderWeights

_ROOT = Path(__file__).parents[2]


def numerics_digest(weights: DecoderWeights) -> str:
    """The digest of a decoder in this process."""
    digest = hashlib.sha256()
    for part in (
        "own decoder",
        weights.linear_type.name,
        weights.other_type.name,
        sources_digest("checkpoint", "cpu", "sampling"),
        platform.machine(),
        *platform.libc_ver(),
    ):
        digest.update(f"{part}\n".encode())
    for rotary in weights.rotaries:
        digest.update(rotary.inv_freq.tobytes())
        digest.update(repr(rotary.scaling).encode())
    return digest.hexdigest()


def sources_digest(*rooms: str) -> str:
    """A digest of the sources of rooms of the verifier, and of what compiles them."""
    digest = hashlib.sha256()
    rooms_of_verifier = (_ROOT / "verifier" / room for room in rooms)
    for folder in (_ROOT / "servicekit/kernels", *rooms_of_verifier):
        for path in sorted(folder.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(source)}\n".encode() + source)
    return digest.hexdigest()
