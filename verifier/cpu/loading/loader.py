"""Loads the weights of a checkpoint's decoder, packed.

weights = load_weights(describe_decoder(folder), dtype="auto", quantization="none")
"""

import dataclasses
import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from verifier.checkpoint.description import (
    BESIDE_MLP_NORMS,
    EMBEDDINGS,
    EXPERT_FACTORS,
    LAYER_SCALAR,
    PER_LAYER_EMBEDDINGS,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    ROUTER_NORM,
    DecoderDescription,
    find_tensor,
    qkv_names,
    qkv_sizes,
    reopened,
)
from verifier.checkpoint.family import ExpertNames
from verifier.checkpoint.group_formats import FORMATS
from verifier.checkpoint.model_config import LayerConfig, ModelConfig
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.stored_tensor import StoredTensor
from verifier.checkpoint.tensor_files import TensorFiles, grouped_pieces, pieces
from verifier.checkpoint.weight_types import LANES, BitsArray, FloatArray, WeightType, widened
from verifier.cpu.group_packing import num_records, pack_groups
from verifier.cpu.kernels.group_tiles import record_bytes
from verifier.cpu.packing import converted, pack_rows
from verifier.cpu.weights import (
    BesideMlp,
    DecoderWeights,
    DeltaNet,
    Experts,
    Layer,
    LayerInput,
    Matrix,
    Part,
    PerLayerInputs,
)

# Bytes; a vector of 16 weights then never lies across two cache lines.
_ALIGNMENT = 64


def load_weights(described: DecoderDescription, *, dtype: str, quantization: str) -> DecoderWeights:
    """Reads and packs all weights.

    Args:
        dtype: "auto", or a key of `DTYPES`: what weights are stored as.
        quantization: "none" or "fp8", of the layers' linear weights.

    Raises:
        CheckpointError: the files are not what they were when they were described, or experts of a
            layer are stored differently.
    """
    config = described.config
    other_type = described.other_type(dtype)
    linear_type = described.linear_type(dtype, quantization)
    with reopened(described) as files:
        files.log_rounding(other_type)
        loader = _Loader(
            files,
            config,
            linear_type=linear_type,
            other_type=other_type,
            keeps_codes=described.stored_type is not None and quantization == "none",
        )
        embeddings = None if config.ties_embeddings else loader.embeddings()
        return DecoderWeights(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            vocab_size=config.vocab_size,
            norm_eps=config.norm_eps,
            attention_scaling=config.attention_scaling,
            attention_softcap=config.attention_softcap,
            logits_softcap=config.logits_softcap,
            embedding_scale=config.embedding_scale,
            activation=config.activation,
            gates_attention=config.family.gates_attention,
            delta=config.delta,
            per_layer_inputs=loader.per_layer_inputs() if config.per_layer_input_size else None,
            rotaries=config.rotaries,
            layers=[loader.layer(index, layer) for index, layer in enumerate(config.layers)],
            final_norm=loader.norm("model.norm"),
            embeddings=embeddings,
            head=_scaled(
                loader.matrix(
                    [EMBEDDINGS.removesuffix(".weight") if embeddings is None else "lm_head"],
                    [config.vocab_size],
                    has_bias=False,
                    weight_type=None if linear_type is WeightType.GROUPS else other_type,
                ),
                config.logits_scale,
            ),
            linear_type=linear_type,
            other_type=other_type,
        )


class _Loader:
    """Reads parts of one checkpoint."""

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        *,
        linear_type: WeightType,
        other_type: WeightType,
        keeps_codes: bool,
    ) -> None:
        """Args: keeps_codes: whether linear weights stay quantised as they are stored."""
        self._files = files
        self._config = config
        self._linear_type = linear_type
        self._other_type = other_type
        self._keeps_codes = keeps_codes

    def layer(self, index: int, layer: LayerConfig) -> Layer:
        config, family = self._config, self._config.family
        prefix = f"model.layers.{index}."
        norms = {field: self.norm(prefix + name) for field, name in family.norms.items()}
        head = prefix + ("linear_attn." if layer.is_delta else "self_attn.")
        query_norm = key_norm = None
        inputs, sizes, output = qkv_names(config, layer), qkv_sizes(config, layer), "o_proj"
        if layer.is_delta:
            assert config.delta is not None
            inputs, sizes, output = config.delta.inputs, config.delta.input_sizes, "out_proj"
        elif family.has_query_key_norms:
            query_norm = self.norm(head + "q_norm")
            key_norm = self.norm(head + "k_norm") if layer.has_kv else None
        experts = gate_up = down = None
        if layer.has_experts:
            assert family.experts is not None
            experts = self._experts(prefix, family.experts)
        else:
            gate_up, down = self._mlp(
                prefix + "mlp", layer.intermediate_size, has_bias=config.has_mlp_bias
            )
            down = _scaled(down, config.residual_scale)
        ones = np.ones(layer.head_dim, dtype=np.float32)
        return Layer(
            kv_layer=layer.kv_layer,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            input_norm=norms.get("input_norm"),
            qkv=self.matrix(
                [head + name for name in inputs],
                sizes,
                has_bias=config.has_qkv_bias and not layer.is_delta,
            ),
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=ones if family.norms_values else None,
            output=_scaled(
                self.matrix(
                    [head + output],
                    [config.hidden_size],
                    has_bias=config.has_output_bias and not layer.is_delta,
                ),
                config.residual_scale,
            ),
            attention_output_norm=norms.get("attention_output_norm"),
            mlp_output_norm=norms.get("mlp_output_norm"),
            mlp_norm=norms.get("mlp_norm"),
            gate_up=gate_up,
            down=down,
            experts=experts,
            sinks=self.values(head + "sinks") if family.has_sinks else None,
            layer_input=self._layer_input(prefix) if config.per_layer_input_size else None,
            scale=float(self.values(prefix + LAYER_SCALAR)[0]) if family.has_layer_scalars else 1.0,
            sliding_window=layer.sliding_window,
            rotary=layer.rotary,
            delta=self._delta(head) if layer.is_delta else None,
        )

    def per_layer_inputs(self) -> PerLayerInputs:
        config = self._config
        size, name = config.per_layer_input_size, PER_LAYER_EMBEDDINGS
        num_outputs = len(config.layers) * size
        embeddings: BitsArray | Matrix
        if group_form(find_tensor(self._files, name)) is None:
            embeddings = self.plain(name, self._other_type)
        else:
            num_rows = [config.per_layer_vocab_size]
            embeddings = self.matrix([name.removesuffix(".weight")], num_rows, has_bias=False)
        projection = self.matrix([PER_LAYER_PROJECTION], [num_outputs], has_bias=False)
        return PerLayerInputs(
            size=size,
            embeddings=embeddings,
            projection=_scaled(projection, config.hidden_size**-0.5),
            norm=self.norm(PER_LAYER_NORM),
        )

    def _layer_input(self, prefix: str) -> LayerInput:
        config = self._config
        gate, down = (
            self.matrix([prefix + name], [size], has_bias=False)
            for name, size in (
                ("per_layer_input_gate", config.per_layer_input_size),
                ("per_layer_projection", config.hidden_size),
            )
        )
        return LayerInput(
            gate=gate, down=down, norm=self.norm(prefix + "post_per_layer_input_norm")
        )

    def _delta(self, prefix: str) -> DeltaNet:
        convolution = self.plain(prefix + "conv1d.weight", WeightType.FLOAT32)
        rates = self.plain(prefix + "A_log", WeightType.FLOAT32)
        return DeltaNet(
            convolution=np.ascontiguousarray(convolution.reshape(len(convolution), -1).T),
            # numpy's float32 powers differ between processors.
            decay_rate=np.array([math.exp(each) for each in rates.tolist()], dtype=np.float32),
            decay_bias=self.plain(prefix + "dt_bias", WeightType.FLOAT32),
            norm=self.values(prefix + "norm.weight"),
        )

    def _mlp(self, prefix: str, size: int, *, has_bias: bool) -> tuple[Matrix, Matrix]:
        """Weights of gate and up, and of down."""
        names = [f"{prefix}.{name}" for name in self._config.family.gate_up]
        gate_up = self.matrix(names, [size, size], has_bias=has_bias)
        hidden, depth = [self._config.hidden_size], _rounded(size)
        down = self.matrix([prefix + ".down_proj"], hidden, has_bias=has_bias, depth=depth)
        return gate_up, down

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
        num_outputs = sizes[0] if len(sizes) == 1 else sum(map(_rounded, sizes))
        depth = depth or find_tensor(self._files, names[0] + ".weight").shape[1]
        matrix = self._empty(names, sizes, depth, num_outputs=num_outputs, weight_type=weight_type)
        self._fill(matrix, names, sizes)
        bias = None
        if has_bias:
            bias = np.zeros(matrix.num_blocks * LANES, dtype=np.float32)
            self._fill_bias(bias, names, sizes)
        return dataclasses.replace(matrix, bias=bias)

    def _experts(self, prefix: str, names: ExpertNames) -> Experts:
        config = self._config
        count, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        of_each = [
            [prefix + name.format(expert=expert) for name in (names.gate, names.up, names.down)]
            for expert in range(count)
        ]
        gate, up, out = of_each[0]
        gate_up = self._empty(
            [gate, up], [size, size], hidden, num_outputs=2 * _rounded(size), num_experts=count
        )
        down = self._empty([out], [hidden], _rounded(size), num_outputs=hidden, num_experts=count)
        if names.has_biases:
            gate_up, down = (
                dataclasses.replace(
                    each, bias=np.zeros((count, each.num_blocks * LANES), dtype=np.float32)
                )
                for each in (gate_up, down)
            )
        for expert, (gate, up, out) in enumerate(of_each):
            for whole, own, sizes in (
                (gate_up, [gate, up], [size, size]),
                (down, [out], [hidden]),
            ):
                self._fill(_one_of(whole, expert), own, sizes)
                if whole.bias is not None:
                    self._fill_bias(whole.bias[expert], own, sizes)
        shared_gate_up = shared_down = shared_gate = None
        if names.shared:
            if names.shared_gate:
                shared_gate = self.values(f"{prefix}{names.shared_gate}.weight")
            shared_gate_up, shared_down = self._mlp(
                prefix + names.shared, config.shared_expert_size, has_bias=False
            )
        return Experts(
            router=self.matrix(
                [prefix + names.router],
                [count],
                has_bias=names.has_biases,
                weight_type=self._other_type,
            ),
            gate_up=gate_up,
            down=down,
            num_experts=count,
            num_per_token=config.num_experts_per_token,
            normalises=config.normalises_experts,
            shared_gate_up=shared_gate_up,
            shared_down=shared_down,
            shared_gate=shared_gate,
            beside_mlp=self._beside_mlp(prefix) if names.is_beside_mlp else None,
        )

    def _beside_mlp(self, prefix: str) -> BesideMlp:
        norms = {field: self.norm(prefix + name) for field, name in BESIDE_MLP_NORMS.items()}
        scale = np.float32(self._config.hidden_size**-0.5)
        return BesideMlp(
            router_norm=self.values(prefix + ROUTER_NORM) * scale,
            factors=self.values(prefix + EXPERT_FACTORS),
            **norms,
        )

    def embeddings(self) -> BitsArray | Matrix:
        """Those that are not the head's."""
        if self._linear_type is WeightType.GROUPS:
            name = EMBEDDINGS.removesuffix(".weight")
            return self.matrix([name], [self._config.vocab_size], has_bias=False)
        return self.plain(EMBEDDINGS, self._other_type)

    def _empty(
        self,
        names: SequenceOf[str],
        sizes: SequenceOf[int],
        depth: int,
        *,
        num_outputs: int,
        num_experts: int | None = None,
        weight_type: WeightType | None = None,
    ) -> Matrix:
        """A matrix of zeros for weights that `_fill` packs, its arguments as in `matrix`."""
        # Of routers, whose kernel takes rows that are not rounded.
        is_plain = weight_type is not None
        weight_type = weight_type or self._linear_type
        experts = () if num_experts is None else (num_experts,)
        if self._linear_type is not WeightType.GROUPS:
            num_blocks = _rounded(num_outputs) // LANES
            blocks = _zeros((*experts, num_blocks, depth, LANES), weight_type.value)
            scales = None
            if weight_type is WeightType.FP8:
                scales = np.zeros((*experts, num_blocks * LANES), dtype=np.float32)
            parts = [Part(blocks=blocks)]
            return Matrix(parts=parts, num_outputs=num_outputs, depth=depth, scales=scales)
        parts = []
        for (name, _), size in zip(_places(names, sizes), sizes, strict=True):
            tensor = find_tensor(self._files, name + ".weight")
            form = None if is_plain else group_form(tensor)
            shape: tuple[int, ...] = (depth, LANES)
            if form is not None:
                shape = num_records(form, depth), record_bytes(FORMATS[form])
            dtype = tensor.type.value if form is None else np.uint8
            blocks = _zeros((*experts, _rounded(size) // LANES, *shape), dtype)
            parts.append(Part(blocks=blocks, form=form))
        return Matrix(parts=parts, num_outputs=num_outputs, depth=depth)

    def _fill(self, matrix: Matrix, names: SequenceOf[str], sizes: SequenceOf[int]) -> None:
        for index, (start, (name, first_row), size) in enumerate(
            zip(_starts(sizes), _places(names, sizes), sizes, strict=True)
        ):
            tensor = find_tensor(self._files, name + ".weight")
            if self._linear_type is WeightType.GROUPS:
                self._fill_part(matrix.parts[index], tensor, first_row, size)
                continue
            keeps_codes = self._keeps_codes and tensor.dtype in FORMATS
            pack_rows(
                self._files,
                tensor,
                first_row,
                size,
                weight_type=WeightType(matrix.blocks.dtype.type),
                blocks=matrix.blocks[start // LANES :],
                scales=None if matrix.scales is None else matrix.scales[start:],
                rounded_to=None if keeps_codes else self._other_type,
            )

    def _fill_bias(self, bias: FloatArray, names: SequenceOf[str], sizes: SequenceOf[int]) -> None:
        for start, (name, first_row), size in zip(
            _starts(sizes), _places(names, sizes), sizes, strict=True
        ):
            values = self.values(name + ".bias")
            bias[start : start + size] = values[first_row : first_row + size]

    def _fill_part(self, part: Part, tensor: StoredTensor, first_row: int, num_rows: int) -> None:
        is_same = group_form(tensor) == part.form
        if part.form is None:
            is_same = tensor.type.value == part.blocks.dtype
        if not is_same:
            raise CheckpointError(f"{tensor.name} is stored as {tensor.dtype}, others otherwise")
        if part.form is None:
            pack_rows(
                self._files,
                tensor,
                first_row,
                num_rows,
                weight_type=tensor.type,
                blocks=part.blocks,
                scales=None,
                rounded_to=tensor.type,
            )
            return
        for start, rows in grouped_pieces(self._files, tensor, first_row, num_rows):
            end = start + _rounded(len(rows.codes))
            pack_groups(part.form, rows, part.blocks[start // LANES : end // LANES])

    def norm(self, name: str) -> FloatArray:
        offset = np.float32(self._config.family.norm_offset)
        return self.values(name + ".weight") + offset

    def values(self, name: str) -> FloatArray:
        """A tensor's values [n], rounded to the type of the model unless weights are in groups."""
        in_groups = self._linear_type is WeightType.GROUPS
        kind = WeightType.FLOAT32 if in_groups else self._other_type
        return np.array(widened(self.plain(name, kind), kind), dtype=np.float32).reshape(-1)

    def plain(self, name: str, kind: WeightType) -> BitsArray:
        """A copy of a tensor [n] or [n, K], not packed, as a type."""
        tensor = find_tensor(self._files, name)
        result: BitsArray = np.empty(tensor.shape, dtype=kind.value)
        rows = result.reshape(tensor.shape[0], -1)
        for start, piece in pieces(self._files, tensor, 0, tensor.shape[0]):
            rows[start : start + len(piece)] = converted(piece, tensor.type, kind)
        return result


def group_form(tensor: StoredTensor) -> str | None:
    """The type of weights in groups, a key of `FORMATS`; None: they are not."""
    return tensor.dtype if tensor.dtype in FORMATS else None


def _scaled(matrix: Matrix, factor: float) -> Matrix:
    """The matrix whose outputs are so many times as large."""
    if factor == 1.0:
        return matrix
    scales, by = matrix.scales, np.float32(factor)
    if scales is None:
        scales = np.ones(matrix.num_blocks * LANES, dtype=np.float32)
    bias = None if matrix.bias is None else matrix.bias * by
    return dataclasses.replace(matrix, scales=scales * by, bias=bias)


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> BitsArray:
    """Aligned zeros; their pages take no memory until they are written."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    result: BitsArray = memory[start : start + num_bytes].view(dtype).reshape(shape)
    return result


def _one_of(experts: Matrix, expert: int) -> Matrix:
    return dataclasses.replace(
        experts,
        parts=[Part(blocks=part.blocks[expert], form=part.form) for part in experts.parts],
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


def _rounded(size: int) -> int:
    return -(-size // LANES) * LANES
