"""`python -m verifier.model.parity_reference FOLDER OUTPUT`: logits by transformers, as a file.

Runs as a child of the verifier; for the decoder for GPUs within it, on the GPU. The reference is
computed in float32, with the values that the weights have in their dtype and after quantisation. In
bfloat16 and float16 the text is computed a second time in that dtype: how far that lies from the
reference is what rounding costs.

OUTPUT, in numpy's format: exact [T, V] float32, rounding (0 in float32).
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from verifier.cpu.loading.packing import dequantised
from verifier.cpu.loading.refusals import CheckpointError
from verifier.cpu.parity import WINDOW_TOKENS, probe_text
from verifier.model.checkpoint import DTYPES, replaced_weights
from verifier.model.parity_probe import shortened_windows

_CPU = torch.device("cpu")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--quantization", choices=["none", "int8", "fp8"], required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        exact, rounding = reference(
            options.folder, dtype=DTYPES[options.dtype], quantization=options.quantization
        )
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    np.savez(options.output, exact=exact.numpy(), rounding=rounding)
    return 0


def reference(
    folder: Path,
    *,
    dtype: torch.dtype,
    quantization: str,
    device: torch.device = _CPU,
) -> tuple[torch.Tensor, float]:
    """Logits [T, V] float32 of the probe's text, on the device, and the distance that `dtype`
    costs.

    Raises:
        CheckpointError: weights are missing.
    """
    transformers.logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        # The plainest code, and the only one that knows softcaps.
        attn_implementation="eager",
        device_map={"": device},
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0].eval().requires_grad_(False)
    if missing := sorted(loaded[1]["missing_keys"]):
        raise CheckpointError(f"weights are missing: {', '.join(missing[:3])}")
    text = probe_text(
        vocab_size=int(model.config.vocab_size),
        max_model_len=int(model.config.max_position_embeddings),
    )
    quantised = set() if quantization == "none" else _quantised_modules(model)

    def values_in(target: torch.dtype) -> Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]:
        def value(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
            if module not in quantised or weight.dim() < 2:
                return weight.to(target)
            rows = weight.float().reshape(-1, weight.shape[-1]).cpu().numpy()
            values = torch.from_numpy(dequantised(rows, quantization))
            return values.reshape(weight.shape).to(weight.device, target)

        return value

    def logits_in(target: torch.dtype) -> torch.Tensor:
        with (
            shortened_windows(model, WINDOW_TOKENS),
            replaced_weights(model, values_in(target)),
            torch.inference_mode(),
        ):
            output = model(input_ids=torch.tensor([text], device=device), use_cache=False)
        logits: torch.Tensor = output.logits[0].float()
        return logits

    exact = logits_in(torch.float32)
    if dtype is torch.float32:
        return exact, 0.0
    return exact, rounding_distance(logits_in(dtype), exact)


def rounding_distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """The median over rows [T, V] of the root mean square difference from the exact row.

    In float16, transformers' residual stream may overflow, and the serving decoder's does not: rows
    that are not finite do not count. NaN, which nothing matches, if none is finite.
    """
    distances = (logits - exact).square().mean(dim=1).sqrt()
    finite = distances[distances.isfinite()]
    return float(finite.median()) if len(finite) else math.nan


def _quantised_modules(model: PreTrainedModel) -> set[torch.nn.Module]:
    """Linear layers except the output layer, and experts whose weights are [E, N, K]."""
    return {
        module
        for module in model.modules()
        if (isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings())
        or any(p.dim() == 3 for p in module.parameters(recurse=False))
    }


if __name__ == "__main__":
    sys.exit(main())
