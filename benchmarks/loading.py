"""Seconds and memory from a checkpoint folder to a model, beside transformers.

    python -m benchmarks.loading [--model FOLDER]

Without --model: random bfloat16 weights of Qwen3-0.6B's shape, 1.2 GB in a temporary folder. Each
loader runs in a process of its own, by turns, after the files were read once. Memory is the
process's largest resident one, with its libraries; seconds are those of the load alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.termination import clear_up_on_sigterm

_SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
}
_OWN = """
from verifier.cpu.loading.loader import describe_decoder, load_weights
started = time.perf_counter()
weights = load_weights(describe_decoder(Path(sys.argv[1])), dtype="auto", quantization="none")
"""
_TRANSFORMERS = """
from transformers import AutoModelForCausalLM
started = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
"""
_FRAME = """
import sys, time
from pathlib import Path
{load}
seconds = time.perf_counter() - started
# Not getrusage: its maximum includes the process that forked this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, int(peak.split()[1]) / 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    clear_up_on_sigterm()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model
        if folder is None:
            folder = Path(temporary)
            write_random(folder)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{folder}: {size / 2**20:.0f} MiB")
        _read(folder)
        results: dict[str, list[tuple[float, float]]] = {"own": [], "transformers": []}
        for _ in range(options.rounds):
            for name, load in (("own", _OWN), ("transformers", _TRANSFORMERS)):
                results[name].append(_run(_FRAME.format(load=load), folder))
        for name, runs in results.items():
            seconds, megabytes = (np.median([run[i] for run in runs]) for i in (0, 1))
            print(f"{name:>12}: {seconds:6.2f} s, {megabytes:6.0f} MiB at most")


def _read(folder: Path) -> None:
    """Brings the weights into the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def write_random(folder: Path) -> None:
    """Writes a checkpoint of `_SHAPE`."""
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    hidden, inner, heads = 1024, 3072, 128
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (151936, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(28):
        prefix = f"model.layers.{layer}."
        parts: list[tuple[str, tuple[int, ...]]] = [
            ("self_attn.q_proj", (16 * heads, hidden)),
            ("self_attn.k_proj", (8 * heads, hidden)),
            ("self_attn.v_proj", (8 * heads, hidden)),
            ("self_attn.o_proj", (hidden, 16 * heads)),
            ("self_attn.q_norm", (heads,)),
            ("self_attn.k_norm", (heads,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ]
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in parts}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = generator.standard_normal(int(np.prod(shape)), dtype=np.float32) * 0.02
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def _run(code: str, folder: Path) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    seconds, megabytes = done.stdout.split()
    return float(seconds), float(megabytes)


if __name__ == "__main__":
    main()
