"""A digest that two verifiers on GPUs share if they continue a sequence with the same tokens.

What decides bits, given equal weights and `--numerics strict`: the dtype; the sources of the
kernels, and what compiles them (Triton, which brings its assembler, for a compute capability);
torch's own kernels, for cosines and the like; the size of K/V blocks, which a kernel is compiled
for; and the host's part in sampling, as `verifier/cpu/numerics_digest.py` says.
"""

import hashlib
import platform

import torch

from verifier.cpu.numerics_digest import rotaries_digest, sources_digest
from verifier.gpu.weights import GpuWeights


def numerics_digest(weights: GpuWeights, *, block_size: int, max_model_len: int) -> str:
    """The digest of a strict decoder, over K/V blocks of `block_size` tokens, of sequences of up to
    `max_model_len`.
    """
    # A CPU needs not have it. Its distribution may have another name than the package.
    import triton

    capability = None
    if weights.device.type == "cuda":
        capability = torch.cuda.get_device_capability(weights.device)
    digest = hashlib.sha256()
    for part in (
        "decoder for GPUs",
        weights.dtype,
        sources_digest("checkpoint", "cpu", "gpu", "attention", "sampling"),
        capability,
        triton.__version__,
        torch.__version__,
        torch.version.cuda,
        block_size,
        platform.machine(),
        *platform.libc_ver(),
    ):
        digest.update(f"{part}\n".encode())
    rotaries = rotaries_digest(weights.config.rotaries, max_model_len=max_model_len)
    digest.update(rotaries.encode())
    return digest.hexdigest()
