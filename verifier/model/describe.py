"""What this machine would make of a checkpoint, found without loading it, as one JSON object.

    python -m verifier.model.describe FOLDER

For `tandem doctor`, which must know neither torch nor this package. Keys, in bytes where they say
so:

    cores                 that the process may use, within its container's limit
    free_bytes            of the machine's memory
    processor_refusal     why the own decoder cannot run here; null: it can
    cpu_support           field, value and refusal (null: it works) of what is offered on CPUs
    gpus                  name, compute_capability, can_run, free_bytes, total_bytes, support of
                          each; null: torch is not asked, since there is no driver
    gpu_decoder_refusal   why transformers computes every model on the GPU; null: it does not, or
                          there is no GPU
    gpu_software          versions by name (null: not there); null: torch is not asked
    contents              what the files hold, as `contents_of` says
    model                 architecture, decoder ("own" or "transformers"), reason (for the latter),
                          weights_bytes, kv_bytes_per_token, state_bytes (recurrent states of one
                          sequence) and max_model_len (null if unknown)
    error                 why the folder holds no checkpoint that is served; null: it does
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servicekit.cores import available_cores
from servicekit.gguf.folder import model_folder
from servicekit.gguf.header import GgufError
from verifier.batch.slot_lengths import DEFAULT_MAX_DRAFTS
from verifier.checkpoint.description import describe_decoder
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.cpu.processor import unsupported_reason
from verifier.model import support
from verifier.model.contents import contents_of
from verifier.model.memory import free_memory_bytes
from verifier.model.own_model import block_bytes, has_gpu_driver, state_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the object; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m verifier.model.describe")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    json.dump(describe(parser.parse_args(argv).folder), sys.stdout)
    print()
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """The object, whatever is in the folder."""
    model, error = None, None
    try:
        model = _describe_model(model_folder(folder))
    except (CheckpointError, GgufError) as refusal:
        error = str(refusal)
    has_driver = has_gpu_driver()
    return {
        "cores": available_cores(),
        "free_bytes": free_memory_bytes(),
        "processor_refusal": unsupported_reason(),
        "cpu_support": support.on_cpu(unsupported_reason()),
        "gpus": list(support.gpus()) if has_driver else None,
        "gpu_decoder_refusal": support.lack_of_triton() if has_driver else None,
        "gpu_software": support.gpu_software() if has_driver else None,
        "contents": contents_of(folder),
        "model": model,
        "error": error,
    }


def _describe_model(folder: Path) -> dict[str, Any]:
    """What is known of a checkpoint.

    Raises:
        CheckpointError: it is not sound, or neither decoder serves it.
    """
    files = (*folder.glob("*.safetensors"), *folder.glob("*.gguf"))
    weights_bytes = sum(file.stat().st_size for file in files)
    try:
        described = describe_decoder(folder)
    except NotServedError as refusal:
        _check_for_transformers(folder)
        return {
            "architecture": None,
            "decoder": "transformers",
            "reason": str(refusal),
            "weights_bytes": weights_bytes,
            "kv_bytes_per_token": None,
            "state_bytes": None,
            "max_model_len": None,
        }
    return {
        "architecture": described.config.architecture,
        "decoder": "own",
        "reason": None,
        "weights_bytes": weights_bytes,
        "kv_bytes_per_token": block_bytes(described, described.own_type, 1),
        "state_bytes": state_bytes(described, DEFAULT_MAX_DRAFTS),
        "max_model_len": described.config.max_position_embeddings,
    }


def _check_for_transformers(folder: Path) -> None:
    """Whether transformers serves the model, as far as can be told without its weights.

    Raises:
        CheckpointError: it does not.
    """
    try:
        # They take seconds and hundreds of megabytes, and may not be there.
        from verifier.transformers_model.config import read_checked_config
    except ImportError:
        return
    read_checked_config(folder)


if __name__ == "__main__":
    sys.exit(main())
