"""Describes a checkpoint folder's decoder, and loads its weights, packed.

described = describe_decoder(folder)
weights = load_weights(described, dtype="auto", quantization="none")
"""

import math
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from servicekit.logs import get_logger
from servicekit.progress_log import ProgressLog
from verifier.cpu.loading.families import ExpertNames
from verifier.cpu.loading.folder_checks import check_files
from verifier.cpu.loading.model_config import DTYPES, LayerConfig, ModelConfig, read_model_config
from verifier.cpu.loading.packing import converted, pack_rows, pieces, widened
from verifier.cpu.loading.refusals import CheckpointError, NotServedError
from verifier.cpu.loading.tensor_files import StoredTensor, TensorFiles
from verifier.cpu.weights import (
    LANES,
    BitsArray,
    DecoderWeights,
    Experts,
    FloatArray,
    Layer,
    Matrix,
    WeightType,
)

logger = get_logger(__name__)

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Bytes; a vector of 16 weights then never lies across two cache lines.
_ALIGNMENT = 64
# Old checkpoints hold what the configuration tells.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# Elsewhere each expert's number follows.
_FUSED_EXPERTS = re.compile(r"\.experts\.[^0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A checkpoint that the decoder computes.

    Attributes:
        own_type: the type of the checkpoint's weights.
    """

    folder: Path
    config: ModelConfig
    own_type: WeightType

    def other_type(self, dtype: str) -> WeightType:
        """The type for `--dtype`: "auto" is the checkpoint's own."""
        return self.own_type if dtype == "auto" else DTYPES[dtype]

    def linear_type(self, dtype: str, quantization: str) -> WeightType:
        """The type of the layers' linear weights, for `--quantization` too."""
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
        needed = _shapes(config)
        allowed = {*needed, _HEAD} if config.ties_embeddings else needed.keys()
        unknown = sorted(
            name for name in files.tensors.keys() - allowed if not name.endswith(_IGNORED_SUFFIX)
        )
        # What is missing may be there by an unknown name.
        _check(files, needed, may_lack=bool(unknown))
        if unknown:
            raise NotServedError(f"the checkpoint holds {unknown[0]}, which has no known use")
        own_type = config.dtype or _find(files, _EMBEDDINGS).type
        if config.ties_embeddings and not _has_tied_head(files):
            raise NotServedError(f"{_HEAD} differs from the embeddings that it is tied to")
    return DecoderDescription(folder=folder, config=config, own_type=own_type)


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
        tensor = _find(files, name)
        assert tensor.type  # refuses other types
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: {name}: has shape {list(tensor.shape)} where config.json tells "
                f"{list(shape)}"
            )


def _has_tied_head(files: TensorFiles) -> bool:
    """Whether a head, if there is one, has the values of the embeddings."""
    head, embeddings = files.tensors.get(_HEAD), files.tensors[_EMBEDDINGS]
    if head is None:
        return True
    if (head.dtype, head.shape) != (embeddings.dtype, embeddings.shape):
        return False
    both = (pieces(files, tensor, 0, tensor.shape[0]) for tensor in (head, embeddings))
    return all(np.array_equal(ours, theirs) for (_, ours), (_, theirs) in zip(*both, strict=True))


def load_weights(described: DecoderDescription, *, dtype: str, quantization: str) -> DecoderWeights:
    """Reads and packs all weights.

    Args:
        dtype: "auto", or a key of `DTYPES`: what weights are stored as.
        quantization: "none" or "fp8", of the layers' linear weights.

    Raises:
        CheckpointError: the files are not what they were when they were described.
    """
    config = described.config
    other_type = described.other_type(dtype)
    linear_type = described.linear_type(dtype, quantization)
    with _reopened(described) as files:
        files.log_rounding(other_type)
        loader = _Loader(files, config, linear_type=linear_type, other_type=other_type)
        embeddings = None
        if not config.ties_embeddings:
            embeddings = loader.plain(_EMBEDDINGS)
        return DecoderWeights(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            norm_eps=config.norm_eps,
            attention_scaling=config.attention_scaling,
            attention_softcap=config.attention_softcap,
            logits_softcap=config.logits_softcap,
            embedding_scale=config.embedding_scale,
            activation=config.activation,
            rotaries=config.rotaries,
            layers=[loader.layer(index, layer) for index, layer in enumerate(config.layers)],
            final_norm=loader.norm("model.norm"),
            embeddings=embeddings,
            head=loader.matrix(
                [_EMBEDDINGS.removesuffix(".weight") if embeddings is None else "lm_head"],
                [config.vocab_size],
                has_bias=False,
                weight_type=other_type,
            ),
            linear_type=linear_type,
            other_type=other_type,
        )


def _reopened(described: DecoderDescription) -> TensorFiles:
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


class _Loader:
    """Reads parts of one checkpoint."""

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        *,
        linear_type: WeightType,
        other_type: WeightType,
    ) -> None:
        self._files = files
        self._config = config
        self._linear_type = linear_type
        self._other_type = other_type

    def layer(self, index: int, layer: LayerConfig) -> Layer:
        config, family = self._config, self._config.family
        prefix = f"model.layers.{index}."
        norms = {field: self.norm(prefix + name) for field, name in family.norms.items()}
        head = prefix + "self_attn."
        query_norm = key_norm = None
        if family.has_query_key_norms:
            query_norm, key_norm = self.norm(head + "q_norm"), self.norm(head + "k_norm")
        experts = gate_up = down = None
        if layer.has_experts:
            assert family.experts is not None
            experts = self._experts(prefix, family.experts)
        else:
            size = config.intermediate_size
            gate_up = self.matrix(
                [f"{prefix}mlp.{name}" for name in family.gate_up],
                [size, size],
                has_bias=config.has_mlp_bias,
            )
            down = self.matrix(
                [f"{prefix}mlp.down_proj"],
                [config.hidden_size],
                has_bias=config.has_mlp_bias,
                depth=_rounded(size),
            )
        return Layer(
            input_norm=norms["input_norm"],
            qkv=self.matrix(
                [head + name for name in family.qkv],
                _qkv_sizes(config),
                has_bias=config.has_qkv_bias,
            ),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self.matrix(
                [head + "o_proj"], [config.hidden_size], has_bias=config.has_output_bias
            ),
            attention_output_norm=norms.get("attention_output_norm"),
            mlp_output_norm=norms.get("mlp_output_norm"),
            mlp_norm=norms["mlp_norm"],
            gate_up=gate_up,
            down=down,
            experts=experts,
            sliding_window=layer.sliding_window,
            rotary=layer.rotary,
        )

    def matrix(
        self,
        names: SequenceOf[str],
        sizes: SequenceOf[int],
        *,
        has_bias: bool,
        depth: int | None = None,
        weight_type: WeightType | None = None,
    ) -> Matrix:
        """Packs weights into one matrix, each part's outputs rounded up to a multiple of 16.

        Args:
            names: of modules; either one for each part, or one that holds all parts' rows.
            sizes: outputs of each part.
            depth: K if it is more than the weights have; the rest is zero.
            weight_type: as it is stored; None: as linear layers are.
        """
        weight_type = weight_type or self._linear_type
        first = _find(self._files, names[0] + ".weight")
        num_outputs = sizes[0] if len(sizes) == 1 else sum(map(_rounded, sizes))
        num_blocks = _rounded(num_outputs) // LANES
        matrix = _empty((num_blocks, depth or first.shape[1], LANES), num_outputs, weight_type)
        bias = np.zeros(num_blocks * LANES, dtype=np.float32) if has_bias else None
        self._fill(matrix, names, sizes)
        for start, (name, first_row), size in zip(
            _starts(sizes), _places(names, sizes), sizes, strict=True
        ):
            if bias is not None:
                values = self.values(name + ".bias")
                bias[start : start + size] = values[first_row : first_row + size]
        return Matrix(
            blocks=matrix.blocks, num_outputs=matrix.num_outputs, scales=matrix.scales, bias=bias
        )

    def _experts(self, prefix: str, names: ExpertNames) -> Experts:
        config = self._config
        count, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        gate_up = _empty(
            (count, 2 * _rounded(size) // LANES, hidden, LANES),
            2 * _rounded(size),
            self._linear_type,
        )
        down = _empty(
            (count, _rounded(hidden) // LANES, _rounded(size), LANES), hidden, self._linear_type
        )
        for expert in range(count):
            gate, up, out = (
                prefix + name.format(expert=expert) for name in (names.gate, names.up, names.down)
            )
            self._fill(_one_of(gate_up, expert), [gate, up], [size, size])
            self._fill(_one_of(down, expert), [out], [hidden])
        return Experts(
            router=self.matrix(
                [prefix + names.router], [count], has_bias=False, weight_type=self._other_type
            ),
            gate_up=gate_up,
            down=down,
            num_per_token=config.num_experts_per_token,
            normalises=config.normalises_experts,
        )

    def _fill(self, matrix: Matrix, names: SequenceOf[str], sizes: SequenceOf[int]) -> None:
        for start, (name, first_row), size in zip(
            _starts(sizes), _places(names, sizes), sizes, strict=True
        ):
            pack_rows(
                self._files,
                _find(self._files, name + ".weight"),
                first_row,
                size,
                weight_type=WeightType(matrix.blocks.dtype.type),
                blocks=matrix.blocks[start // LANES :],
                scales=None if matrix.scales is None else matrix.scales[start:],
                rounded_to=self._other_type,
            )

    def norm(self, name: str) -> FloatArray:
        offset = np.float32(self._config.family.norm_offset)
        return self.values(name + ".weight") + offset

    def values(self, name: str) -> FloatArray:
        """A tensor's values [n], rounded to the type of the model."""
        bits = self.plain(name)
        return np.array(widened(bits, self._other_type), dtype=np.float32).reshape(-1)

    def plain(self, name: str) -> BitsArray:
        """A copy of a tensor [n] or [n, K], not packed, in the type of the model."""
        tensor = _find(self._files, name)
        result: BitsArray = np.empty(tensor.shape, dtype=self._other_type.value)
        rows = result.reshape(tensor.shape[0], -1)
        for start, piece in pieces(self._files, tensor, 0, tensor.shape[0]):
            rows[start : start + len(piece)] = converted(piece, tensor.type, self._other_type)
        return result


def _empty(shape: tuple[int, ...], num_outputs: int, weight_type: WeightType) -> Matrix:
    """A matrix of zeros; its pages take no memory until they are written."""
    scales = None
    if weight_type is WeightType.FP8:
        scales = np.zeros((*shape[:-3], shape[-3] * LANES), dtype=np.float32)
    num_bytes = math.prod(shape) * np.dtype(weight_type.value).itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    blocks = memory[start : start + num_bytes].view(weight_type.value).reshape(shape)
    return Matrix(blocks=blocks, num_outputs=num_outputs, scales=scales)


def _one_of(experts: Matrix, expert: int) -> Matrix:
    return Matrix(
        blocks=experts.blocks[expert],
        num_outputs=experts.num_outputs,
        scales=None if experts.scales is None else experts.scales[expert],
    )


def _places(names: SequenceOf[str], sizes: SequenceOf[int]) -> list[tuple[str, int]]:
    """Each part's module and its first row there."""
    if len(names) == len(sizes):
        return [(name, 0) for name in names]
    return [(names[0], sum(sizes[:part])) for part in range(len(sizes))]


def _starts(sizes: SequenceOf[int]) -> list[int]:
    """Each part's first output in its packed matrix."""
    return [sum(map(_rounded, sizes[:part])) for part in range(len(sizes))]


def _qkv_sizes(config: ModelConfig) -> list[int]:
    return [
        heads * config.head_dim
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]


def _find(files: TensorFiles, name: str) -> StoredTensor:
    if name not in files.tensors:
        raise CheckpointError(f"weights are missing: {name}")
    return files.tensors[name]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that the model needs."""
    family, hidden = config.family, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDINGS: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.ties_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)

    def add(names: SequenceOf[str], sizes: SequenceOf[int], depth: int, has_bias: bool) -> None:
        of_each = sizes if len(names) == len(sizes) else [sum(sizes)]
        for name, size in zip(names, of_each, strict=True):
            shapes[name + ".weight"] = (size, depth)
            if has_bias:
                shapes[name + ".bias"] = (size,)

    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        for name in family.norms.values():
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        if family.has_query_key_norms:
            for name in ("q_norm", "k_norm"):
                shapes[f"{attention}{name}.weight"] = (config.head_dim,)
        qkv = _qkv_sizes(config)
        add([attention + name for name in family.qkv], qkv, hidden, config.has_qkv_bias)
        add([attention + "o_proj"], [hidden], qkv[0], config.has_output_bias)
        if not layer.has_experts:
            size = config.intermediate_size
            names = [f"{prefix}mlp.{name}" for name in family.gate_up]
            add(names, [size, size], hidden, config.has_mlp_bias)
            add([prefix + "mlp.down_proj"], [hidden], size, config.has_mlp_bias)
            continue
        experts, size = family.experts, config.expert_size
        assert experts is not None
        add([prefix + experts.router], [config.num_experts], hidden, False)
        for expert in range(config.num_experts):
            add([prefix + experts.gate.format(expert=expert)], [size], hidden, False)
            add([prefix + experts.up.format(expert=expert)], [size], hidden, False)
            add([prefix + experts.down.format(expert=expert)], [hidden], size, False)
    return shapes


def _rounded(size: int) -> int:
    return -(-size // LANES) * LANES
