"""From a described checkpoint to `GpuWeights`: each tensor from its mapped file to the device.

A weight is read in pieces of some megabytes, and each piece's pages leave this process's memory
after it. So the host never holds the model, nor any whole tensor of it.
"""

import torch

from verifier.cpu.loading.loader import DecoderDescription
from verifier.cpu.loading.model_config import LayerConfig, ModelConfig
from verifier.cpu.loading.packing import pieces
from verifier.cpu.loading.refusals import CheckpointError
from verifier.cpu.loading.tensor_files import StoredTensor, TensorFiles
from verifier.cpu.weights import WeightType
from verifier.gpu.operations import Operations, operations_for
from verifier.gpu.weights import DenseLinear, Experts, GpuWeights, Layer, Linear, Mlp

TORCH_DTYPES = {
    WeightType.FLOAT32: torch.float32,
    WeightType.BFLOAT16: torch.bfloat16,
    WeightType.FLOAT16: torch.float16,
}


def load_weights(
    described: DecoderDescription,
    *,
    dtype: str,
    device: torch.device,
    operations: Operations | None = None,
) -> GpuWeights:
    """Reads all weights.

    Args:
        dtype: "auto", the checkpoint's own, or "float32", "bfloat16", "float16".
        operations: that will compute with the weights; None: the device's, not strict.

    Raises:
        CheckpointError: the files are not what they were when they were described.
    """
    config = described.config
    torch_dtype = TORCH_DTYPES[described.other_type(dtype)]
    operations = operations or operations_for(device)
    with TensorFiles(described.folder) as files:
        loader = _Loader(files, config, dtype=torch_dtype, device=device, operations=operations)
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
            inv_freqs=[torch.from_numpy(r.inv_freq).to(device) for r in config.rotaries],
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
    ) -> None:
        self._files = files
        self._config = config
        self._dtype = dtype
        self._device = device
        self._operations = operations

    def layer(self, index: int, layer: LayerConfig) -> Layer:
        config, family = self._config, self._config.family
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        hidden, head_dim = config.hidden_size, config.head_dim
        norms = {field: self.norm(prefix + name, hidden) for field, name in family.norms.items()}
        head_norms = None
        if family.has_query_key_norms:
            both = [self.norm(attention + name, head_dim) for name in ("q_norm", "k_norm")]
            head_norms = torch.stack(both)
        return Layer(
            input_norm=norms["input_norm"],
            qkv=self.linear(
                [attention + name for name in family.qkv],
                ((config.num_heads + 2 * config.num_kv_heads) * head_dim, hidden),
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
            mlp=self._experts(prefix) if layer.has_experts else self._mlp(prefix),
            sliding_window=layer.sliding_window or None,
            rotary=layer.rotary,
        )

    def norm(self, name: str, size: int) -> torch.Tensor:
        """[size] float32, rounded to the model's dtype before the family's offset is added."""
        weight = self.vector([name + ".weight"], size)
        return weight.float() + self._config.family.norm_offset

    def linear(self, names: list[str], shape: tuple[int, int], *, has_bias: bool) -> Linear:
        """One layer whose outputs are those of the named modules, one after the other."""
        weight = self.matrix([name + ".weight" for name in names], shape)
        bias = self.vector([name + ".bias" for name in names], shape[0]) if has_bias else None
        return DenseLinear(operations=self._operations, weight=weight, bias=bias)

    def vector(self, names: list[str], size: int) -> torch.Tensor:
        return self.matrix(names, (size, 1)).view(size)

    def matrix(self, names: list[str], shape: tuple[int, int]) -> torch.Tensor:
        """The rows of the named tensors, one after the other, [N, K] of the model's dtype.

        Raises:
            CheckpointError: a tensor is missing, or they do not fill the shape.
        """
        filled = torch.empty(shape, dtype=self._dtype, device=self._device)
        end = 0
        for name in names:
            tensor = self._files.tensors.get(name)
            if tensor is None or tensor.shape[1:] not in (shape[1:], ()):
                raise CheckpointError(f"{name} is missing or has changed")
            start, end = end, end + tensor.shape[0]
            self._fill(filled[start:end], tensor)
        if end != shape[0]:
            raise CheckpointError(f"{', '.join(names)}: {end} rows, not {shape[0]}")
        return filled

    def _fill(self, rows: torch.Tensor, tensor: StoredTensor) -> None:
        for start, piece in pieces(self._files, tensor, 0, tensor.shape[0]):
            # A copy: the pages are read-only and leave memory, and torch warns of neither.
            bits = torch.from_numpy(piece.copy())
            rows[start : start + len(piece)].copy_(bits.view(TORCH_DTYPES[tensor.type]))

    def _mlp(self, prefix: str) -> Mlp:
        config = self._config
        hidden, size = config.hidden_size, config.intermediate_size
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
        hidden, size = config.hidden_size, config.expert_size
        experts = range(config.num_experts)
        gate, up, down = (prefix + name for name in (names.gate, names.up, names.down))
        return Experts(
            router=self.matrix([f"{prefix}{names.router}.weight"], (config.num_experts, hidden)),
            gate_up=[
                self.linear(
                    [gate.format(expert=e), up.format(expert=e)], (2 * size, hidden), has_bias=False
                )
                for e in experts
            ],
            down=[
                self.linear([down.format(expert=e)], (hidden, size), has_bias=False)
                for e in experts
            ],
            num_per_token=config.num_experts_per_token,
            normalises=config.normalises_experts,
        )
