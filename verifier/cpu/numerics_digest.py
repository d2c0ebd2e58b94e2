"""A digest that two verifiers share if they continue a sequence with the same tokens.

What decides bits, given equal weights (the model's digest covers these): how they are stored; the
kernels' sources, since every sum has one order, whatever the processor's tiles, threads or batch,
and the compiler may not change it; sampling, likewise; and the C library's sines, cosines, powers
and logarithms, in rotary embeddings and noise. Versions of numba or numpy decide nothing.
"""

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

from verifier.checkpoint.weight_types import Rotary
from verifier.cpu.weights import DecoderWeights

_ROOT = Path(__file__).parents[2]


def numerics_digest(weights: DecoderWeights, *, max_model_len: int) -> str:
    """The digest of a decoder in this process, of sequences of up to so many tokens."""
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
    digest.update(rotaries_digest(weights.rotaries, max_model_len=max_model_len).encode())
    return digest.hexdigest()


def rotaries_digest(rotaries: Sequence[Rotary], *, max_model_len: int) -> str:
    """A digest of the rotary embeddings of sequences of up to so many tokens."""
    digest = hashlib.sha256()
    for rotary in rotaries:
        digest.update(rotary.inv_freq.tobytes())
        digest.update(repr(rotary.scaling).encode())
        # A limit that no sequence exceeds makes them all short.
        if rotary.long_inv_freq is not None and max_model_len > rotary.max_short_tokens:
            digest.update(rotary.long_inv_freq.tobytes())
            digest.update(repr(rotary.max_short_tokens).encode())
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
