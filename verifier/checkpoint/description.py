"""Describes a checkpoint folder's decoder: which tensors it has, of which shapes."""

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servicekit.logs import get_logger
from servicekit.progress_log import ProgressLog
from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.folder_checks import check_files
from verifier.checkpoint.group_formats import FORMATS
from verifier.checkpoint.model_config import DTYPES, LayerConfig, ModelConfig, read_model_config
from verifier.checkpoint.quantized_tensors import QuantizedTensor
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.stored_tensor import StoredTensor
from verifier.checkpoint.tensor_files import TensorFiles, pieces
from verifier.checkpoint.weight_types import WeightType

logger = get_logger(__name__)

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER_SCALAR = "layer_scalar"
# Of a mixture beside an MLP; norms by fields of `verifier.cpu.weights.BesideMlp`.
ROUTER_NORM, EXPERT_FACTORS = "router.scale", "router.per_expert_scale"
BESIDE_MLP_NORMS: Mapping[str, str] = {
    "input_norm": "pre_feedforward_layernorm_2",
    "output_norm": "post_feedforward_layernorm_2",
    "mlp_output_norm": "post_feedforward_layernorm_1",
}
PER_LAYER_EMBEDDINGS = "model.embed_tokens_per_layer.weight"
PER_LAYER_PROJECTION = "model.per_layer_model_projection"
PER_LAYER_NORM = "model.per_layer_projection_norm"
# Old checkpoints hold what the configuration tells.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# Elsewhere each expert's number follows.
_FUSED_EXPERTS = re.compile(r"\.experts\.[^0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A checkpoint that the decoder computes.

    Attributes:
        own_type: the type of the checkpoint's weights; of those in groups, of K/V.
        stored_type: the type of linear weights that are quantised already, or None.
        quantization: as in `TensorFiles`.
    """

    folder: Path
    config: ModelConfig
    own_type: WeightType
    stored_type: WeightType | None
    quantization: str

    def other_type(self, dtype: str) -> WeightType:
        """The type for `--dtype`: "auto" is the checkpoint's own."""
        return self.own_type if dtype == "auto" else DTYPES[dtype]

    def linear_type(self, dtype: str, quantization: str) -> WeightType:
        """The type of the layers' linear weights, for `--quantization` too."""
        if self.stored_type is not None and quantization == "none":
            return self.stored_type
        return WeightType.FP8 if quantization == "fp8" else self.other_type(dtype)


def describe_decoder(folder: Path) -> DecoderDescription:
    """Reads configuration and headers; no weights.

    Raises:
        CheckpointError: the folder holds no sound checkpoint.
        NotServedError: the decoder does not compute this model; transformers may.
    """
    check_files(folder)
    if (folder / "adapter_config.json").exists():
        raise NotServedError("it is an adapter")
    config = read_model_config(folder)
    with TensorFiles(folder) as files:
        if fused := next(filter(_FUSED_EXPERTS.search, files.tensors), None):
            raise NotServedError(f"the checkpoint holds {fused}, of all experts in one")
        num_sparse = sum(layer.has_experts for layer in config.layers)
        if num_sparse * config.num_experts > len(files.tensors):
            raise CheckpointError(f"{folder}: weights of experts are missing")
        if files.is_text_part and HEAD in files.tensors:
            # Such a folder's flags contradict each other; its classes heed the tensor alone.
            config = dataclasses.replace(config, ties_embeddings=False)
        if config.delta is not None:
            inputs = _delta_inputs(files)
            delta = dataclasses.replace(
                config.delta,
                inputs=inputs or config.delta.inputs,
                # llama.cpp's qwen3next has the order of transformers.
                takes_turns=files.quantization == "gguf" and "in_proj_ba" not in inputs,
            )
            config = dataclasses.replace(config, delta=delta)
        needed = _shapes(config)
        allowed = {*needed, HEAD} if config.ties_embeddings else needed.keys()
        unknown = sorted(
            name
            for name in files.tensors.keys() - allowed
            if not (name.endswith(_IGNORED_SUFFIX) or name.startswith(_unused(config)))
            and not _is_gptqs_bias(files, name)
        )
        # What is missing may be there by an unknown name.
        _check(files, needed, may_lack=bool(unknown))
        if unknown:
            raise NotServedError(f"the checkpoint holds {unknown[0]}, which has no known use")
        own_type = config.dtype or find_tensor(files, EMBEDDINGS).type
        stored_type = _stored_type(files, needed, config)
        if config.ties_embeddings and not _has_tied_head(files):
            raise NotServedError(f"{HEAD} differs from the embeddings that it is tied to")
    return DecoderDescription(
        folder=folder,
        config=config,
        own_type=own_type,
        stored_type=stored_type,
        quantization=files.quantization,
    )


def reopened(described: DecoderDescription) -> TensorFiles:
    """The files, checked again: packing writes where the shapes say.

    Raises:
        CheckpointError: they are not what they were.
    """
    try:
        files = TensorFiles(described.folder, ProgressLog("weights", logger))
        try:
            _check(files, _shapes(described.config))
        except BaseException:
            files.close()
            raise
    except NotServedError as error:
        raise CheckpointError(f"{described.folder} has changed: {error}") from error
    return files


def find_tensor(files: TensorFiles, name: str) -> StoredTensor:
    if name not in files.tensors:
        raise CheckpointError(f"weights are missing: {name}")
    return files.tensors[name]


def qkv_sizes(config: ModelConfig, layer: LayerConfig) -> list[int]:
    """Outputs of queries, each with its gate behind it if there are gates, of keys, and values."""
    num_queries = config.num_heads * (2 if config.family.gates_attention else 1)
    num_others = [layer.num_kv_heads] * 2 if layer.has_kv else []
    return [heads * layer.head_dim for heads in (num_queries, *num_others)]


def qkv_names(config: ModelConfig, layer: LayerConfig) -> tuple[str, ...]:
    """The modules of these outputs: one of each, or one of all."""
    if layer.kv_layer is not None:
        return config.family.qkv[:1]
    queries, *others = config.family.qkv
    if layer.has_keys_as_values:
        others = [others[0], others[0]]
    return queries, *others


def _unused(config: ModelConfig) -> tuple[str, ...]:
    """How tensors begin that the model is computed without."""
    keys_and_values = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return config.family.unused + tuple(
        f"model.layers.{index}.self_attn.{name}"
        for index, layer in enumerate(config.layers)
        if layer.kv_layer is not None
        for name in keys_and_values
    )


def _delta_inputs(files: TensorFiles) -> tuple[str, ...]:
    """The names of a gated delta net's inputs, of which there are several forms."""
    parts = (
        (("in_proj_qkvz",), ("in_proj_qkv", "in_proj_z")),
        (
            ("in_proj_ba",),
            ("in_proj_b", "in_proj_a"),
        ),
    )
    stored = {name.split(".")[-2] for name in files.tensors if ".linear_attn." in name}
    return tuple(
        name for forms in parts for form in forms if stored.issuperset(form) for name in form
    )


def _check(
    files: TensorFiles, needed: Mapping[str, tuple[int, ...]], *, may_lack: bool = False
) -> None:
    """Args:
        may_lack: whether tensors may be missing.

    Raises:
        CheckpointError: a tensor is missing, or has another shape.
        NotServedError: a tensor has a type that is not read.
    """
    for name, shape in needed.items():
        if may_lack and name not in files.tensors:
            continue
        tensor = find_tensor(files, name)
        assert tensor.type  # refuses other types
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: {name}: has shape {list(tensor.shape)} where config.json tells "
                f"{list(shape)}"
            )


def _stored_type(
    files: TensorFiles, needed: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> WeightType | None:
    if all(tensor.dtype not in FORMATS for tensor in files.tensors.values()):
        return None
    experts = config.family.experts
    others = [EMBEDDINGS, HEAD, PER_LAYER_EMBEDDINGS]
    if experts is not None:
        plain = [name for name in (experts.router, experts.shared_gate) if name]
        others += [
            f"model.layers.{i}.{name}.weight" for i in range(len(config.layers)) for name in plain
        ]
    linear = [name for name, shape in needed.items() if len(shape) == 2 and name not in others]
    have_row_scales = (
        isinstance(tensor, QuantizedTensor) and tensor.has_row_scales
        for tensor in (find_tensor(files, name) for name in linear)
    )
    # What is plain beside them must stay it.
    are_plain = (
        name not in files.tensors or files.tensors[name].dtype not in FORMATS for name in others
    )
    return WeightType.FP8 if all(have_row_scales) and all(are_plain) else WeightType.GROUPS


def _is_gptqs_bias(files: TensorFiles, name: str) -> bool:
    """Whether it is a bias of zeros, which older writers of GPTQ gave every layer."""
    if files.quantization != "gptq" or not name.endswith(".bias"):
        return False
    tensor = files.tensors[name]
    assert tensor.type  # refuses other types
    return not files.rows(tensor, 0, tensor.shape[0]).any()


def _has_tied_head(files: TensorFiles) -> bool:
    """Whether a head, if there is one, has the values of the embeddings."""
    head, embeddings = files.tensors.get(HEAD), files.tensors[EMBEDDINGS]
    if head is None:
        return True
    if (head.dtype, head.shape) != (embeddings.dtype, embeddings.shape):
        return False
    both = (pieces(files, tensor, 0, tensor.shape[0]) for tensor in (head, embeddings))
    return all(np.array_equal(ours, theirs) for (_, ours), (_, theirs) in zip(*both, strict=True))


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the model needs."""
    family, hidden = config.family, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.ties_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)

    def add(names: SequenceOf[str], sizes: SequenceOf[int], depth: int, has_bias: bool) -> None:
        of_each = sizes if len(names) == len(sizes) else [sum(sizes)]
        for name, size in zip(names, of_each, strict=True):
            shapes[name + ".weight"] = (size, depth)
            if has_bias:
                shapes[name + ".bias"] = (size,)

    def add_attention(attention: str, layer: LayerConfig) -> None:
        qkv = qkv_sizes(config, layer)
        if family.has_query_key_norms:
            # Fewer sizes where there are no keys.
            for name, size in zip(("q_norm", "k_norm"), qkv, strict=False):
                own = size if family.norms_projections else layer.head_dim
                shapes[f"{attention}{name}.weight"] = (own,)
        names = [attention + name for name in qkv_names(config, layer)]
        add(names, qkv, hidden, config.has_qkv_bias)
        attended = config.num_heads * layer.head_dim
        add([attention + "o_proj"], [hidden], attended, config.has_output_bias)
        if family.has_sinks:
            shapes[attention + "sinks"] = (config.num_heads,)

    input_size = config.per_layer_input_size
    if input_size:
        all_sizes = len(config.layers) * input_size
        shapes[PER_LAYER_EMBEDDINGS] = (config.per_layer_vocab_size, all_sizes)
        shapes[PER_LAYER_PROJECTION + ".weight"] = (all_sizes, hidden)
        shapes[PER_LAYER_NORM + ".weight"] = (input_size,)
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        if input_size:
            shapes[prefix + "per_layer_input_gate.weight"] = (input_size, hidden)
            shapes[prefix + "per_layer_projection.weight"] = (hidden, input_size)
            shapes[prefix + "post_per_layer_input_norm.weight"] = (hidden,)
        for name in family.norms.values():
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if family.has_layer_scalars:
            shapes[prefix + LAYER_SCALAR] = (1,)
        if layer.is_delta:
            assert config.delta is not None
            shapes |= _delta_shapes(prefix + "linear_attn.", config.delta, hidden)
        else:
            add_attention(prefix + "self_attn.", layer)
        if not layer.has_experts:
            size = layer.intermediate_size
            names = [f"{prefix}mlp.{name}" for name in family.gate_up]
            add(names, [size, size], hidden, config.has_mlp_bias)
            add([prefix + "mlp.down_proj"], [hidden], size, config.has_mlp_bias)
            continue
        experts, size = family.experts, config.expert_size
        assert experts is not None
        bias = experts.has_biases
        if experts.shared:
            shared, own = prefix + experts.shared, config.shared_expert_size
            if experts.shared_gate:
                shapes[f"{prefix}{experts.shared_gate}.weight"] = (1, hidden)
            add([f"{shared}.{name}" for name in family.gate_up], [own, own], hidden, False)
            add([shared + ".down_proj"], [hidden], own, False)
        if experts.is_beside_mlp:
            for name in BESIDE_MLP_NORMS.values():
                shapes[f"{prefix}{name}.weight"] = (hidden,)
            shapes[prefix + ROUTER_NORM] = (hidden,)
            shapes[prefix + EXPERT_FACTORS] = (config.num_experts,)
        add([prefix + experts.router], [config.num_experts], hidden, bias)
        for expert in range(config.num_experts):
            add([prefix + experts.gate.format(expert=expert)], [size], hidden, bias)
            add([prefix + experts.up.format(expert=expert)], [size], hidden, bias)
            add([prefix + experts.down.format(expert=expert)], [hidden], size, bias)
    return shapes


def _delta_shapes(prefix: str, delta: DeltaShape, hidden: int) -> dict[str, tuple[int, ...]]:
    values = delta.num_value_heads * delta.value_dim
    return {
        **{
            f"{prefix}{name}.weight": (size, hidden)
            for name, size in zip(delta.inputs, delta.input_sizes, strict=True)
        },
        prefix + "conv1d.weight": (delta.num_channels, 1, delta.kernel_size),
        prefix + "A_log": (delta.num_value_heads,),
        prefix + "dt_bias": (delta.num_value_heads,),
        prefix + "norm.weight": (delta.value_dim,),
        prefix + "out_proj.weight": (hidden, values),
    }
