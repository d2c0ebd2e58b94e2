"""From a described checkpoint to `GpuWeights`: each tensor from its mapped file to the device.

A weight is read in pieces of some megabytes, and each piece's pages leave this process's memory
after it. So the host never holds the model, nor any whole tensor of it.
"""

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from servicekit.logs import get_logger
from servicekit.progress_log import ProgressLog
from verifier.checkpoint.description import DecoderDescription
from verifier.checkpoint.group_formats import FORMATS, GROUP
from verifier.checkpoint.model_config import LayerConfig, ModelConfig
from verifier.checkpoint.quantized_tensors import QuantizedTensor
from verifier.checkpoint.refusals import CheckpointError
from verifier.checkpoint.stored_tensor import StoredTensor
from verifier.checkpoint.tensor_files import TensorFiles, grouped_pieces, pieces
from verifier.checkpoint.weight_types import Rotary, WeightType
from verifier.gpu.fp8 import FP8, ScaledLinear, quantised
from verifier.gpu.groups import CODE_BLOCK, GroupedWeight
from verifier.gpu.operations import Operations, operations_for
from verifier.gpu.weights import (
    DenseLinear,
    Experts,
    GpuWeights,
    GroupedLinear,
    Layer,
    Linear,
    Mlp,
)

logger = get_logger(__name__)

TORCH_DTYPES = {
    WeightType.FLOAT32: torch.float32,
    WeightType.BFLOAT16: torch.bfloat16,
    WeightType.FLOAT16: torch.float16,
}
_GROUPED_TYPES = ("INT4", "Q4_0", "Q4_1")
"""Stored types of layers that are not widened."""


_Piece = TypeVar("_Piece")


def load_weights(
    described: DecoderDescription,
    *,
    dtype: str,
    device: torch.device,
    operations: Operations | None = None,
    quantization: str = "none",
) -> GpuWeights:
    """Reads all weights.

    Args:
        dtype: "auto", the checkpoint's own, or "float32", "bfloat16", "float16".
        operations: that will compute with the weights; None: the device's, not strict.
        quantization: "none" or, of a model without experts, "fp8": of the layers' linear weights.

    Raises:
        CheckpointError: the files are not what they were when they were described.
    """
    config = described.config
    torch_dtype = TORCH_DTYPES[described.other_type(dtype)]
    operations = operations or operations_for(device)
    with TensorFiles(described.folder, ProgressLog("weights", logger)) as files:
        files.log_rounding(described.other_type(dtype))
        loader = _Loader(
            files,
            config,
            dtype=torch_dtype,
            device=device,
            operations=operations,
            is_fp8=quantization == "fp8",
        )
        hidden, vocabulary = config.hidden_size, config.vocab_size
        embeddings = loader.matrix(["model.embed_tokens.weight"], (vocabulary, hidden))
        head = embeddings
        if not config.ties_embeddings:
            head = loader.matrix(["lm_head.weight"], (vocabulary, hidden))
        return GpuWeights(
            config=config,
            operations=operations,
            dtype=torch_dtype,
            device=device,
            embeddings=embeddings,
            head=head,
            final_norm=loader.norm("model.norm", hidden),
            layers=[loader.layer(index, layer) for index, layer in enumerate(config.layers)],
            inv_freqs=[_inv_freq(rotary).to(device) for rotary in config.rotaries],
        )


class _Loader:
    """Reads parts of one checkpoint."""

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        is_fp8: bool,
    ) -> None:
        self._files = files
        self._config = config
        self._dtype = dtype
        self._device = device
        self._operations = operations
        self._is_fp8 = is_fp8

    def layer(self, index: int, layer: LayerConfig) -> Layer:
        config, family = self._config, self._config.family
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        hidden, head_dim = config.hidden_size, layer.head_dim
        norms = {field: self.norm(prefix + name, hidden) for field, name in family.norms.items()}
        head_norms = None
        if family.has_query_key_norms:
            both = [self.norm(attention + name, head_dim) for name in ("q_norm", "k_norm")]
            head_norms = torch.stack(both)
        return Layer(
            input_norm=norms["input_norm"],
            qkv=self.linear(
                [attention + name for name in family.qkv],
                ((config.num_heads + 2 * layer.num_kv_heads) * head_dim, hidden),
                has_bias=config.has_qkv_bias,
            ),
            head_norms=head_norms,
            output=self.linear(
                [attention + "o_proj"],
                (hidden, config.num_heads * head_dim),
                has_bias=config.has_output_bias,
            ),
            attention_output_norm=norms.get("attention_output_norm"),
            mlp_output_norm=norms.get("mlp_output_norm"),
            mlp_norm=norms["mlp_norm"],
            mlp=(
                self._experts(prefix)
                if layer.has_experts
                else self._mlp(prefix, layer.intermediate_size)
            ),
            sliding_window=layer.sliding_window or None,
            rotary=layer.rotary,
        )

    def norm(self, name: str, size: int) -> torch.Tensor:
        """[size] float32, rounded to the model's dtype before the family's offset is added."""
        weight = self.vector([name + ".weight"], size)
        return weight.float() + self._config.family.norm_offset

    def linear(self, names: list[str], shape: tuple[int, int], *, has_bias: bool) -> Linear:
        """One layer whose outputs are those of the named modules, one after the other."""
        bias = self.vector([name + ".bias" for name in names], shape[0]) if has_bias else None
        weights = [name + ".weight" for name in names]
        if self._is_fp8:
            weight, scale = self._quantised_matrix(weights, shape)
            return ScaledLinear(weight=weight, scale=scale, bias=bias)
        if grouped := self._grouped_matrix(weights, shape):
            return GroupedLinear(operations=self._operations, weight=grouped, bias=bias)
        return DenseLinear(
            operations=self._operations, weight=self.matrix(weights, shape), bias=bias
        )

    def vector(self, names: list[str], size: int) -> torch.Tensor:
        return self.matrix(names, (size, 1)).view(size)

    def matrix(self, names: list[str], shape: tuple[int, int]) -> torch.Tensor:
        """The rows of the named tensors, one after the other, [N, K] of the model's dtype.

        Raises:
            CheckpointError: a tensor is missing, or they do not fill the shape.
        """
        filled = self._empty(*shape)
        self._fill(filled, names)
        return filled

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _fill(self, filled: torch.Tensor, names: list[str]) -> None:
        for start, piece in self._float_pieces(names, (filled.shape[0], filled.shape[1])):
            filled[start : start + len(piece)].copy_(piece)

    def _grouped_matrix(self, names: list[str], shape: tuple[int, int]) -> GroupedWeight | None:
        """As `matrix`, of codes of 4 bits; None: it is to be widened, or the files have changed."""
        tensors = [self._files.tensors[name] for name in names if name in self._files.tensors]
        kinds = {tensor.dtype for tensor in tensors}
        if len(tensors) < len(names) or len(kinds) > 1 or not kinds.issubset(_GROUPED_TYPES):
            return None
        dtypes = {_scale_type(tensor) for tensor in tensors}
        if len(dtypes) > 1 or torch.float32 in (*dtypes, self._dtype):
            return None
        form = FORMATS[kinds.pop()]
        weight = GroupedWeight.empty(
            shape,
            size=math.gcd(CODE_BLOCK, *map(_group_size, tensors)),
            dtype=dtypes.pop(),
            has_minima=form.has_minimum,
            device=self._device,
        )
        for start, rows in self._pieces(names, shape, grouped_pieces):
            weight.fill(start, rows, form.zero)
        return weight

    def _quantised_matrix(
        self, names: list[str], shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `matrix`, then quantised: FP8 [N, K], and scales [N, 1] float32."""
        weight = torch.empty(shape, dtype=FP8, device=self._device)
        scale = torch.empty((shape[0], 1), dtype=torch.float32, device=self._device)
        for start, piece in self._float_pieces(names, shape):
            rows = slice(start, start + len(piece))
            weight[rows], scale[rows] = quantised(piece.to(self._device, self._dtype))
        return weight, scale

    def _float_pieces(
        self, names: list[str], shape: tuple[int, int]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """As `_pieces`, on the host, in the checkpoint's dtype."""

        def read(
            files: TensorFiles, tensor: StoredTensor, first: int, count: int
        ) -> Iterator[tuple[int, torch.Tensor]]:
            for start, piece in pieces(files, tensor, first, count):
                # A copy: the pages are read-only and leave memory, and torch warns of neither.
                yield start, torch.from_numpy(piece.copy()).view(TORCH_DTYPES[tensor.type])

        return self._pieces(names, shape, read)

    def _pieces(
        self,
        names: list[str],
        shape: tuple[int, int],
        read: Callable[[TensorFiles, StoredTensor, int, int], Iterator[tuple[int, _Piece]]],
    ) -> Iterator[tuple[int, _Piece]]:
        """The rows of the named tensors, one after the other: each piece's first row in [N, K], and
        its rows.

        Raises:
            CheckpointError: a tensor is missing, or they do not fill the shape.
        """
        end = 0
        for name in names:
            tensor = self._files.tensors.get(name)
            if tensor is None or tensor.shape[1:] not in (shape[1:], ()):
                raise CheckpointError(f"{name} is missing or has changed")
            first, end = end, end + tensor.shape[0]
            if end > shape[0]:
                break
            for start, piece in read(self._files, tensor, 0, tensor.shape[0]):
                yield first + start, piece
        if end != shape[0]:
            raise CheckpointError(f"{', '.join(names)}: {end} rows, not {shape[0]}")

    def _mlp(self, prefix: str, size: int) -> Mlp:
        config = self._config
        hidden = config.hidden_size
        return Mlp(
            gate_up=self.linear(
                [f"{prefix}mlp.{name}" for name in config.family.gate_up],
                (2 * size, hidden),
                has_bias=config.has_mlp_bias,
            ),
            down=self.linear(
                [prefix + "mlp.down_proj"], (hidden, size), has_bias=config.has_mlp_bias
            ),
        )

    def _experts(self, prefix: str) -> Experts:
        config, names = self._config, self._config.family.experts
        assert names is not None
        assert not self._is_fp8, "a mixture of experts is not quantised"
        hidden, size = config.hidden_size, config.expert_size
        num_experts = config.num_experts
        gate, up, out = (prefix + name for name in (names.gate, names.up, names.down))
        gate_up = self._empty(num_experts, 2 * size, hidden)
        down = self._empty(num_experts, hidden, size)
        for each in range(num_experts):
            halves = [gate.format(expert=each), up.format(expert=each)]
            self._fill(gate_up[each], [name + ".weight" for name in halves])
            self._fill(down[each], [out.format(expert=each) + ".weight"])
        return Experts(
            router=self.linear([prefix + names.router], (num_experts, hidden), has_bias=False),
            gate_up=gate_up,
            down=down,
            num_per_token=config.num_experts_per_token,
            normalises=config.normalises_experts,
        )


def _group_size(tensor: StoredTensor) -> int:
    return tensor.group_size if isinstance(tensor, QuantizedTensor) else GROUP


def _scale_type(tensor: StoredTensor) -> torch.dtype:
    """Which holds the file's scales."""
    if isinstance(tensor, QuantizedTensor):
        return TORCH_DTYPES[tensor.scales.type]
    return torch.float16


def _inv_freq(rotary: Rotary) -> torch.Tensor:
    """As in `GpuWeights`."""
    kinds = [each for each in (rotary.inv_freq, rotary.long_inv_freq) if each is not None]
    return torch.stack([torch.from_numpy(each) for each in kinds])
