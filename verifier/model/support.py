"""What the verifier offers on CPUs and on GPUs: the one source of docs/gpu.md and `tandem doctor`.

Imports torch only to ask for GPUs. A model may restrict these further.
"""

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servicekit.config import ConfigError

MIN_COMPUTE_CAPABILITY = (8, 0)
"""The least of a GPU that can be used: Ampere. Older GPUs have no bfloat16, and flash-attn's
kernels do not run on them.
"""

MIN_FP8_COMPUTE_CAPABILITY = (8, 9)
"""The least of a GPU that knows FP8: Ada."""

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
ATTENTION = "attention_backend"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Whether something is offered on one kind of device, and how, or why not."""

    note: str = ""
    is_offered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One value of a field of the verifier's configuration."""

    field: str
    value: str
    cpu: Support
    gpu: Support
    # What the GPU must have at least.
    min_capability: tuple[int, int] = MIN_COMPUTE_CAPABILITY
    # Whether on a CPU only the own decoder does it.
    needs_own_decoder: bool = False
    # Whether on a GPU it needs the package triton, and what that needs.
    needs_triton: bool = False

    def refusal(self, capability: tuple[int, int]) -> str | None:
        """Why it does not work on this machine's GPU of that compute capability; None: it does."""
        if not self.gpu.is_offered:
            return self.gpu.note
        if capability < self.min_capability:
            return f"needs compute capability {_dotted(self.min_capability)}"
        if self.needs_triton:
            return lack_of_triton()
        return _attention_refusal(self.value) if self.field == ATTENTION else None


_YES = Support()

FEATURES = (
    Feature(
        field="numerics",
        value="strict",
        cpu=Support(note="the own decoder"),
        gpu=Support(note="the decoder for GPUs, with the attention backend triton"),
        needs_own_decoder=True,
        needs_triton=True,
    ),
    Feature(
        field="numerics",
        value="fast",
        cpu=Support(note="transformers"),
        gpu=Support(note="the decoder for GPUs, else transformers"),
    ),
    Feature(field="dtype", value="float32", cpu=_YES, gpu=_YES),
    Feature(
        field="dtype",
        value="bfloat16",
        cpu=Support(note="fast: with AVX512_BF16 or AMX, else emulated"),
        gpu=_YES,
    ),
    Feature(
        field="dtype",
        value="float16",
        cpu=Support(note="fast: with AVX512_FP16 or AMX-FP16, else emulated"),
        gpu=_YES,
    ),
    Feature(field="quantization", value="none", cpu=_YES, gpu=_YES),
    Feature(
        field="quantization",
        value="fp8",
        cpu=Support(note="strict; fast: not mixtures of experts"),
        gpu=Support(note="weights and activations; not mixtures of experts"),
        min_capability=MIN_FP8_COMPUTE_CAPABILITY,
    ),
    Feature(
        field=ATTENTION,
        value="sdpa",
        cpu=Support(note="fast"),
        gpu=Support(note="a call per sequence and layer"),
    ),
    Feature(
        field=ATTENTION,
        value="triton",
        cpu=Support(is_offered=False, note="runs on GPUs only"),
        gpu=Support(note="the package triton"),
    ),
    Feature(
        field=ATTENTION,
        value="flash_attn",
        cpu=Support(is_offered=False, note="runs on GPUs only"),
        gpu=Support(note="the package flash-attn; float16 and bfloat16"),
    ),
)


def table() -> str:
    """The support matrix as Markdown."""
    lines = ["| | CPU | GPU | from compute capability |", "|---|---|---|---|"]
    for feature in FEATURES:
        capability = _dotted(feature.min_capability) if feature.gpu.is_offered else "-"
        lines.append(
            f"| `--{feature.field.replace('_', '-')} {feature.value}` | {_cell(feature.cpu)} "
            f"| {_cell(feature.gpu)} | {capability} |"
        )
    return "\n".join(lines)


def on_cpu(processor_refusal: str | None = None) -> list[dict[str, str | None]]:
    """Each feature's field, value and refusal (null: it works) on a CPU.

    Args:
        processor_refusal: why the own decoder cannot run on this one.
    """
    return [
        _told(
            feature,
            (processor_refusal if feature.needs_own_decoder else None)
            if feature.cpu.is_offered
            else feature.cpu.note,
        )
        for feature in FEATURES
    ]


def on_gpu(capability: tuple[int, int]) -> list[dict[str, str | None]]:
    """What `on_cpu` says, for this machine's GPU, which has that compute capability."""
    return [_told(feature, feature.refusal(capability)) for feature in FEATURES]


def gpu_software() -> dict[str, str | None]:
    """Versions by name; null: it is not there."""
    import torch

    return {
        "driver": driver_version(),
        "CUDA of torch": torch.version.cuda,
        "triton": _version("triton"),
        "flash-attn": _version("flash_attn"),
    }


def gpus() -> Iterator[dict[str, Any]]:
    """Each GPU that torch sees."""
    import torch

    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        free_bytes, total_bytes = _memory(index)
        yield {
            "name": torch.cuda.get_device_name(index),
            "compute_capability": _dotted(capability),
            "can_run": capability >= MIN_COMPUTE_CAPABILITY,
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
            "support": on_gpu(capability),
        }


def _memory(gpu: int) -> tuple[int | None, int | None]:
    """Free and total bytes; None where this process may not use the GPU, or nothing is free."""
    import torch

    try:
        return torch.cuda.mem_get_info(gpu)
    except RuntimeError:
        return None, None


def lack_of_triton() -> str | None:
    """What the decoder for GPUs lacks here; None: nothing."""
    from verifier.gpu.attention import selection

    return selection.lack_of_triton()


def driver_version(file: Path = _DRIVER_VERSION) -> str | None:
    """The version of NVIDIA's kernel module; None: there is none."""
    try:
        found = re.search(r"Module.*?\s(\d+\.\d+(\.\d+)?)\s", file.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _attention_refusal(name: str) -> str | None:
    """What the choice of a backend says of a usual model on a GPU here."""
    import torch

    from verifier.gpu.attention.selection import FLAG, choose_attention

    try:
        choose_attention(
            name,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            head_dim=128,
        )
    except ConfigError as error:
        return str(error).removeprefix(f"{FLAG}: ").removeprefix(f"{name}: ")
    return None


def _told(feature: Feature, refusal: str | None) -> dict[str, str | None]:
    return {"field": feature.field, "value": feature.value, "refusal": refusal}


def _cell(support: Support) -> str:
    answer = "yes" if support.is_offered else "no"
    return f"{answer}: {support.note}" if support.note else answer


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
