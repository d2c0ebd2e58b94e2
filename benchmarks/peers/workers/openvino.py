"""OpenVINO GenAI as a peer: its continuous batching pipeline, plain and with its prompt lookup.

Runs in the peer's own environment. The model is built from the checkpoint with OpenVINO's
operations, as its GGUF reader builds one, since that reader takes no float32 or bfloat16 weights.
The pipeline then puts its paged attention in place of the attention written here.
"""

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.checkpoint import (
    read_config,
    read_tensors,
    rope_theta,
    to_bfloat16,
    to_float32,
)
from benchmarks.peers.protocol import (
    Generate,
    Options,
    Request,
    eos_token_id,
    lookup_tokens,
    serve,
)

# Installed in the environment of this peer only.
ov: Any = importlib.import_module("openvino")
genai: Any = importlib.import_module("openvino_genai")
ops: Any = importlib.import_module("openvino.opset13")

MAX_NGRAM = 3
BATCHED_TOKENS = 4096


def start(options: Options) -> Generate:
    folder = options.converted / "openvino"
    if not (folder / "openvino_model.xml").exists():
        _convert(options.model, folder, options.dtype)
    end = eos_token_id(options.model)
    pipelines: dict[bool, Any] = {}

    def pipeline(looks_up: bool) -> Any:
        if looks_up not in pipelines:
            pipelines[looks_up] = _pipeline(folder, options, looks_up)
        return pipelines[looks_up]

    def generate(mode: str, requests: Sequence[Request], streams: int) -> list[list[int]]:
        num_drafts = lookup_tokens(mode)
        outputs: list[list[int]] = []
        for first in range(0, len(requests), streams):
            batch = requests[first : first + streams]
            results = pipeline(num_drafts > 0).generate(
                [ov.Tensor(np.array([request.prompt], np.int64)) for request in batch],
                [_generation(request, end, num_drafts) for request in batch],
            )
            outputs += [list(result.m_generation_ids[0]) for result in results]
        return outputs

    return generate


def _pipeline(folder: Path, options: Options, looks_up: bool) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    precision = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16}[options.dtype]
    properties = {
        "INFERENCE_NUM_THREADS": options.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "PERFORMANCE_HINT": "LATENCY",
    }
    if looks_up:
        properties["prompt_lookup"] = True
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def _generation(request: Request, end: int, num_drafts: int) -> Any:
    generation = genai.GenerationConfig()
    generation.max_new_tokens = request.max_new_tokens
    generation.do_sample = False
    generation.eos_token_id = end
    generation.stop_token_ids = {end}
    generation.include_stop_str_in_output = True
    if num_drafts:
        generation.num_assistant_tokens = num_drafts
        generation.max_ngram_size = MAX_NGRAM
    return generation


def _convert(model: Path, folder: Path, dtype: str) -> None:
    """Writes the model in OpenVINO's format, complete or not at all."""
    partial = folder.with_name("openvino.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(model / name, partial)
    ov.save_model(_Graph(model, dtype).build(), partial / "openvino_model.xml", False)
    partial.rename(folder)


class _Graph:
    """A Qwen3 decoder in OpenVINO's operations.

    Shape legend: B sequences, L new tokens, S tokens attended, H heads, D head_dim.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        self._config = read_config(model)
        self._tensors = dict(read_tensors(model))
        self._dtype = dtype

    def build(self) -> Any:
        config = self._config
        ids, mask, positions = (
            ops.parameter([-1, -1], np.int64, name=name)
            for name in ("input_ids", "attention_mask", "position_ids")
        )
        beams = ops.parameter([-1], np.int32, name="beam_idx")
        parameters = [ids, mask, positions, beams]
        for parameter in parameters:
            parameter.output(0).set_names({parameter.get_friendly_name()})
        self._batch = ops.gather(ops.shape_of(ids), _ints(0), _ints(0))  # []
        self._beams = beams
        self._cos, self._sin = self._rotary(positions)
        self._mask = _attention_mask(mask, positions)
        self._sinks: list[Any] = []

        embeddings = self._weight("model.embed_tokens.weight")
        hidden = ops.gather(embeddings, ops.convert(ids, "i32"), _ints(0))
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm.weight")
            hidden = ops.add(hidden, self._attention(normed, layer))
            normed = self._norm(hidden, f"{name}.post_attention_layernorm.weight")
            gate = ops.swish(self._linear(normed, f"{name}.mlp.gate_proj"))
            gated = ops.multiply(gate, self._linear(normed, f"{name}.mlp.up_proj"))
            hidden = ops.add(hidden, self._linear(gated, f"{name}.mlp.down_proj"))
        hidden = self._norm(hidden, "model.norm.weight")
        tied = config["tie_word_embeddings"]
        head = embeddings if tied else self._weight("lm_head.weight")
        logits = ops.result(ops.matmul(hidden, head, False, True))
        logits.output(0).set_names({"logits"})
        return ov.Model([logits], self._sinks, parameters, "qwen3")

    def _weight(self, name: str) -> Any:
        tensor = self._tensors[name]
        if self._dtype == "float32":
            return ops.constant(to_float32(tensor))
        stored = ov.Tensor(ov.Type.bf16, list(tensor.shape))
        stored.data[:] = to_bfloat16(tensor).view(stored.data.dtype)
        return ops.convert(ops.constant(stored), "f32")

    def _linear(self, rows: Any, name: str) -> Any:
        return ops.matmul(rows, self._weight(f"{name}.weight"), False, True)

    def _norm(self, rows: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.power(rows, _floats(2)), _ints([-1]), True)
        root = ops.sqrt(ops.add(mean, _floats(self._config["rms_norm_eps"])))
        scaled = ops.multiply(rows, ops.divide(_floats(1), root))
        return ops.multiply(ops.constant(to_float32(self._tensors[name])), scaled)

    def _rotary(self, positions: Any) -> tuple[Any, Any]:
        dim = self._config["head_dim"]
        steps = np.arange(0, dim, 2, dtype=np.float32) / dim
        inverse = (1 / rope_theta(self._config) ** steps).astype(np.float32)
        at = ops.convert(ops.unsqueeze(positions, _ints(1)), "f32")  # [B, 1, L]
        column = ops.constant(inverse.reshape(1, -1, 1))
        angles = ops.transpose(ops.matmul(column, at, False, False), _ints([0, 2, 1]))
        both = ops.concat([angles, angles], -1)  # [B, L, D]
        return ops.unsqueeze(ops.cos(both), _ints(1)), ops.unsqueeze(ops.sin(both), _ints(1))

    def _rotated(self, heads: Any) -> Any:
        dim = self._config["head_dim"]
        first = ops.slice(heads, _ints([0]), _ints([dim // 2]), _ints([1]), _ints([3]))
        second = ops.slice(heads, _ints([dim // 2]), _ints([2**31]), _ints([1]), _ints([3]))
        turned = ops.concat([ops.multiply(second, _floats(-1)), first], -1)
        return ops.add(ops.multiply(heads, self._cos), ops.multiply(turned, self._sin))

    def _attention(self, rows: Any, layer: int) -> Any:
        config = self._config
        name = f"model.layers.{layer}.self_attn"
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim = config["head_dim"]

        def heads(kind: str, count: int) -> Any:
            split = ops.reshape(
                self._linear(rows, f"{name}.{kind}_proj"), _ints([0, 0, count, dim]), True
            )
            if kind != "v":
                split = self._norm(split, f"{name}.{kind}_norm.weight")
            turned = ops.transpose(split, _ints([0, 2, 1, 3]))  # [B, H, L, D]
            return turned if kind == "v" else self._rotated(turned)

        query = heads("q", num_heads)
        key = self._remembered(heads("k", num_kv_heads), f"past_key_values.{layer}.key")
        value = self._remembered(heads("v", num_kv_heads), f"past_key_values.{layer}.value")
        attended = ops.scaled_dot_product_attention(
            query, self._repeated(key), self._repeated(value), self._mask
        )
        joined = ops.reshape(
            ops.transpose(attended, _ints([0, 2, 1, 3])), _ints([0, 0, num_heads * dim]), True
        )
        return self._linear(joined, f"{name}.o_proj")

    def _remembered(self, new: Any, name: str) -> Any:
        """Appends to a state, [B, Hkv, S, D]."""
        num_kv_heads, dim = self._config["num_key_value_heads"], self._config["head_dim"]
        util: Any = importlib.import_module("openvino.op.util")
        about = util.VariableInfo()
        about.data_shape = ov.PartialShape([-1, num_kv_heads, -1, dim])
        about.data_type = ov.Type.f32
        about.variable_id = name
        variable = util.Variable(about)
        shape = ops.concat(
            [ops.unsqueeze(self._batch, _ints(0)), _ints([num_kv_heads]), _ints([0]), _ints([dim])],
            0,
        )
        read = ops.read_value(ops.broadcast(_floats(0), shape), variable)
        past = ops.gather(read, self._beams, _ints(0))
        joined = ops.concat([past, new], 2)
        self._sinks.append(ops.assign(joined, variable))
        return joined

    def _repeated(self, heads: Any) -> Any:
        config = self._config
        times = config["num_attention_heads"] // config["num_key_value_heads"]
        if times == 1:
            return heads
        grouped = ops.unsqueeze(heads, _ints(2))  # [B, Hkv, 1, S, D]
        shape = ops.concat([_ints([1]), _ints([1]), _ints([times]), _ints([1]), _ints([1])], 0)
        wide = ops.broadcast(grouped, shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(
            wide, _ints([0, config["num_attention_heads"], -1, config["head_dim"]]), True
        )


def _attention_mask(mask: Any, positions: Any) -> Any:
    """Returns which of S tokens each new one sees, bool [B, 1, L, S]."""
    length = ops.gather(ops.shape_of(mask), _ints(1), _ints(0))
    columns = ops.range(_ints(0), length, _ints(1), "i64")
    rows = ops.unsqueeze(ops.unsqueeze(positions, _ints(1)), _ints(3))  # [B, 1, L, 1]
    present = ops.convert(ops.unsqueeze(ops.unsqueeze(mask, _ints(1)), _ints(2)), "boolean")
    return ops.logical_and(ops.less_equal(columns, rows), present)


def _ints(value: int | list[int]) -> Any:
    return ops.constant(np.array(value, np.int64))


def _floats(value: float) -> Any:
    return ops.constant(np.array(value, np.float32))


if __name__ == "__main__":
    serve(start)
