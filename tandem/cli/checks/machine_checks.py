"""What `tandem doctor` looks at on this machine: versions, processor, memory, GPU, model, ports.

What only a verifier can tell comes from a child process, `python -m verifier.model.describe`: its
packages take hundreds of megabytes, and may not be there.
"""

import errno
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.cli.checks.check import Check, fail, ok, sampling_check, warn
from tandem.cli.model_path import is_gguf
from tandem.cli.up import INSTALL_ALL, missing_services
from tandem.free_ports import check_port

_SHOWN_VERSIONS = ("grpcio", "protobuf", "torch", "transformers", "numba")
_OLDEST_PYTHON = (3, 11)
# Instructions that the own decoder needs, and those that make it or transformers faster.
_REQUIRED_FEATURES = ("avx2", "fma", "f16c")
_HELPFUL_FEATURES = ("avx512f", "avx512_bf16", "amx_bf16")
_DESCRIPTION_TIMEOUT_S = 120.0
_MIB, _GIB = 1 << 20, 1 << 30


def versions() -> Iterator[Check]:
    """Python, the packages that matter, and the services that can run here."""
    python = platform.python_version()
    if sys.version_info[:2] < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        yield fail("python", python, f"install Python {oldest} or later")
    else:
        yield ok("python", python)
    found = [f"{name} {version}" for name in _SHOWN_VERSIONS if (version := _version(name))]
    yield ok("packages", ", ".join(found))
    if missing := missing_services():
        yield warn(
            "services",
            f"the packages of {', '.join(missing)} are not installed",
            f"{INSTALL_ALL}, unless this machine is only a client",
        )
    else:
        yield ok("services", "drafter, verifier and gateway can run here")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Check:
    """The instructions that decoding on a CPU uses."""
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):
        return ok("processor", machine)
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return warn("processor", f"{machine}, features unknown", "run this on Linux")
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    missing = [feature for feature in _REQUIRED_FEATURES if feature not in flags]
    if missing:
        return warn(
            "processor",
            f"no {', '.join(missing)}",
            "the own decoder cannot run: use a newer processor or a GPU, or expect the speed of "
            "transformers",
        )
    helpful = [feature for feature in _HELPFUL_FEATURES if feature in flags]
    return ok("processor", f"{machine} with {', '.join([*_REQUIRED_FEATURES, *helpful])}")


def model_files(folder: Path) -> Iterator[Check]:
    """The files that a model folder must have, and whether they are readable."""
    if is_gguf(folder):
        yield ok("model", f"{folder}, as a GGUF file")
        return
    if not folder.is_dir():
        yield fail("model", f"{folder} is no folder", "name a model's folder with --model")
        return
    for name, user in (("config.json", "verifier"), ("tokenizer.json", "gateway")):
        try:
            # A pipe or a device may never end.
            if (folder / name).exists() and not (folder / name).is_file():
                raise OSError(errno.EINVAL, "is no file")
            json.loads((folder / name).read_bytes())
        except OSError as error:
            yield fail(
                name, f"{folder / name}: {error.strerror}", f"the {user} needs it: copy it there"
            )
        except (ValueError, RecursionError) as error:
            yield fail(name, f"{folder / name}: is no JSON: {error}", "download the model again")
        else:
            yield ok(name, f"{folder / name}")
    if not any(path.is_file() for path in folder.glob("*.safetensors")):
        yield fail(
            "weights",
            f"{folder} has no file *.safetensors",
            "download the model's weights in this format",
        )


def port(flag: str, number: int) -> Check:
    """Whether `tandem up` could listen there."""
    address = f"127.0.0.1:{number}"
    try:
        check_port(number)
    except OSError as error:
        return warn(
            flag, f"{address}: {error.strerror}", f"start with tandem up --{flag} 0, or another"
        )
    return ok(flag, f"{address} is free")


def sampling(folder: Path) -> Iterator[Check]:
    """How a gateway would sample the model over HTTP, where a request says nothing."""
    if importlib.util.find_spec("gateway") is None:
        return
    done = subprocess.run(
        [sys.executable, "-m", "gateway.text.sampling_defaults", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield fail("sampling", last, "pip install 'tandem-serve[gateway]' again")
        return
    found: dict[str, Any] = json.loads(done.stdout)
    if "error" in found:
        yield fail("sampling", found["error"], "download the file again")
        return
    for name, value in found["ignored"].items():
        yield warn(
            "sampling",
            f"generation_config.json has a {name} of {value!r:.64}, which is ignored",
            "correct it there",
        )
    yield sampling_check("sampling", found["defaults"])


def describe(folder: Path) -> tuple[Check | None, dict[str, Any]]:
    """What a verifier would make of the model; a check if it cannot be asked."""
    if importlib.util.find_spec("verifier") is None:
        return warn("verifier", "is not installed", "pip install 'tandem-serve[verifier]'"), {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "verifier.model.describe", str(folder)],
            capture_output=True,
            text=True,
            timeout=_DESCRIPTION_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        advice = "the machine is overloaded, or its GPU driver hangs: see nvidia-smi"
        return fail("verifier", f"no answer in {_DESCRIPTION_TIMEOUT_S:g} s", advice), {}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return fail("verifier", last, "pip install 'tandem-serve[verifier]' again"), {}
    found: dict[str, Any] = json.loads(done.stdout)
    return None, found


def described(found: dict[str, Any]) -> Iterator[Check]:
    """What the description says of cores, GPUs, the model and its memory."""
    yield ok("cores", f"{found['cores']} for this process, within its container's limit")
    yield from _gpus(found)
    if found["contents"] is not None:
        yield ok("contents", _contents(found["contents"]))
    if found["error"] is not None:
        yield fail(
            "checkpoint",
            found["error"],
            "if a file is broken, download the model again; docs/models.md says what is served",
        )
        return
    model = found["model"]
    refusal = found["processor_refusal"]
    if any(gpu["can_run"] for gpu in found["gpus"] or []):
        refusal = found["gpu_decoder_refusal"]
        where = "on the GPU"
    else:
        where = "on a CPU"
    if model["decoder"] == "own" and refusal is None:
        yield ok("decoder", f"{model['architecture']}: Tandem's own, {where}")
    else:
        yield warn(
            "decoder",
            f"transformers: {model['reason'] or refusal}",
            "it works if transformers knows the model; docs/models.md lists the faster families",
        )
    yield _memory(found)


def _contents(contents: dict[str, Any]) -> str:
    """The architecture, the size, and the tensors by type."""
    types = ", ".join(
        f"{each['tensors']} of {each['type']} ({each['bytes'] / _MIB:.1f} MiB)"
        for each in contents["types"]
    )
    size = f"{contents['file_bytes'] / _MIB:.1f} MiB"
    return f"{contents['architecture'] or 'no architecture told'}, {size}, tensors: {types}"


def _gpus(found: dict[str, Any]) -> Iterator[Check]:
    """Each GPU, what works on it, and what does not."""
    yield ok("cpu support", _supported(found["cpu_support"]))
    if found["gpus"] is None:
        yield ok("gpu", "none (no driver): the model runs on the CPU")
        return
    if not found["gpus"]:
        yield warn(
            "gpu",
            "a driver, but torch sees no GPU",
            "install a build of torch for the driver's version of CUDA",
        )
        return
    versions = found["gpu_software"]
    software = ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items())
    for gpu in found["gpus"]:
        text = f"{gpu['name']}, compute capability {gpu['compute_capability']}, {_free(gpu)}"
        text += f"; {software}"
        if not gpu["can_run"]:
            yield fail("gpu", text, "use a GPU of 8.0 or later, or --device cpu")
            continue
        if gpu["free_bytes"] is None:
            yield warn("gpu", text, "end what uses it, or allow this user to")
        elif lack := found["gpu_decoder_refusal"]:
            yield warn("gpu", f"{text}; {lack}", "Tandem's decoder for GPUs needs it")
        else:
            yield ok("gpu", text)
        yield ok("gpu support", _supported(gpu["support"]))


def _free(gpu: dict[str, Any]) -> str:
    """How much of its memory is free."""
    if gpu["free_bytes"] is None:
        return "full or not accessible"
    return f"{gpu['free_bytes'] / _GIB:.1f} of {gpu['total_bytes'] / _GIB:.1f} GiB free"


def _supported(features: list[dict[str, Any]]) -> str:
    """What works, by the verifier's flag, and why the rest does not."""
    works: dict[str, list[str]] = {}
    for each in features:
        if each["refusal"] is None:
            works.setdefault(each["field"], []).append(each["value"])
    found = [f"{field.replace('_', ' ')} {', '.join(values)}" for field, values in works.items()]
    found += [
        f"not {each['value']} ({each['refusal']})"
        for each in features
        if each["refusal"] is not None
    ]
    return "; ".join(found)


def _memory(found: dict[str, Any]) -> Check:
    """Weights, and the K/V of one sequence of the model's full length, against what is free."""
    model = found["model"]
    gpus = [gpu for gpu in found["gpus"] or [] if gpu["can_run"]]
    free = max((gpu["free_bytes"] or 0 for gpu in gpus), default=found["free_bytes"])
    where = "of the GPU" if gpus else "of the machine"
    weights = model["weights_bytes"]
    text = f"{weights / _GIB:.2f} GiB of weights, {free / _GIB:.1f} GiB free {where}"
    if weights > free:
        return fail(
            "memory",
            text,
            "use a smaller model, --quantization, or several GPUs (docs/tensor_parallel.md)",
        )
    if model["kv_bytes_per_token"] is None:
        return ok("memory", text)
    kv = model["kv_bytes_per_token"] * model["max_model_len"] + model["state_bytes"]
    text += f", {kv / _GIB:.2f} GiB of K/V for {model['max_model_len']} tokens"
    if weights + kv > free:
        return warn("memory", text, "lower TANDEM_VERIFIER_MAX_MODEL_LEN")
    return ok("memory", text)
