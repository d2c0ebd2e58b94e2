"""Loads the weights of a checkpoint's decoder, packed.

weights = load_weights(describe_decoder(folder), dtype="auto", quantization="none")
"""

import dataclasses
import math

import numpy as np

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
from verifier.checkpoint.model_config import LayerConfig
from verifier.checkpoint.weight_types import LANES, BitsArray, WeightType
from verifier.cpu.loading.packed_tensors import PackedTensors, group_form, one_of, rounded, scaled
from verifier.cpu.weights import (
    BesideMlp,
    DecoderWeights,
    DeltaNet,
    Experts,
    Layer,
    LayerInput,
    Matrix,
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
            PackedTensors(
                files,
                config,
                linear_type=linear_type,
                other_type=other_type,
                keeps_codes=described.stored_type is not None and quantization == "none",
            )
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
            final_norm=loader.tensors.norm("model.norm"),
            embeddings=embeddings,
            head=scaled(
                loader.tensors.matrix(
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

    def __init__(self, tensors: PackedTensors) -> None:
        self.tensors = tensors
        self._config = tensors.config

    def layer(self, index: int, layer: LayerConfig) -> Layer:
        config, family = self._config, self._config.family
        prefix = f"model.layers.{index}."
        norms = {field: self.tensors.norm(prefix + name) for field, name in family.norms.items()}
        head = prefix + ("linear_attn." if layer.is_delta else "self_attn.")
        query_norm = key_norm = None
        inputs, sizes, output = qkv_names(config, layer), qkv_sizes(config, layer), "o_proj"
        if layer.is_delta:
            assert config.delta is not None
            inputs, sizes, output = config.delta.inputs, config.delta.input_sizes, "out_proj"
        elif family.has_query_key_norms:
            query_norm = self.tensors.norm(head + "q_norm")
            key_norm = self.tensors.norm(head + "k_norm") if layer.has_kv else None
        experts = gate_up = down = None
        if layer.has_experts:
            assert family.experts is not None
            experts = self._experts(prefix, family.experts)
        else:
            gate_up, down = self._mlp(
                prefix + "mlp", layer.intermediate_size, has_bias=config.has_mlp_bias
            )
            down = scaled(down, config.residual_scale)
        ones = np.ones(layer.head_dim, dtype=np.float32)
        return Layer(
            kv_layer=layer.kv_layer,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            input_norm=norms.get("input_norm"),
            qkv=self.tensors.matrix(
                [head + name for name in inputs],
                sizes,
                has_bias=config.has_qkv_bias and not layer.is_delta,
            ),
            query_norm=query_norm,
            key_norm=key_norm,
            value_norm=ones if family.norms_values else None,
            output=scaled(
                self.tensors.matrix(
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
            sinks=self.tensors.values(head + "sinks") if family.has_sinks else None,
            layer_input=self._layer_input(prefix) if config.per_layer_input_size else None,
            scale=float(self.tensors.values(prefix + LAYER_SCALAR)[0])
            if family.has_layer_scalars
            else 1.0,
            sliding_window=layer.sliding_window,
            rotary=layer.rotary,
            delta=self._delta(head) if layer.is_delta else None,
        )

    def per_layer_inputs(self) -> PerLayerInputs:
        config = self._config
        size, name = config.per_layer_input_size, PER_LAYER_EMBEDDINGS
        num_outputs = len(config.layers) * size
        embeddings: BitsArray | Matrix
        if group_form(find_tensor(self.tensors.files, name)) is None:
            embeddings = self.tensors.plain(name, self.tensors.other_type)
        else:
            num_rows = [config.per_layer_vocab_size]
            embeddings = self.tensors.matrix(
                [name.removesuffix(".weight")], num_rows, has_bias=False
            )
        projection = self.tensors.matrix([PER_LAYER_PROJECTION], [num_outputs], has_bias=False)
        return PerLayerInputs(
            size=size,
            embeddings=embeddings,
            projection=scaled(projection, config.hidden_size**-0.5),
            norm=self.tensors.norm(PER_LAYER_NORM),
        )

    def _layer_input(self, prefix: str) -> LayerInput:
        config = self._config
        gate, down = (
            self.tensors.matrix([prefix + name], [size], has_bias=False)
            for name, size in (
                ("per_layer_input_gate", config.per_layer_input_size),
                ("per_layer_projection", config.hidden_size),
            )
        )
        return LayerInput(
            gate=gate, down=down, norm=self.tensors.norm(prefix + "post_per_layer_input_norm")
        )

    def _delta(self, prefix: str) -> DeltaNet:
        convolution = self.tensors.plain(prefix + "conv1d.weight", WeightType.FLOAT32)
        rates = self.tensors.plain(prefix + "A_log", WeightType.FLOAT32)
        return DeltaNet(
            convolution=np.ascontiguousarray(convolution.reshape(len(convolution), -1).T),
            # numpy's float32 powers differ between processors.
            decay_rate=np.array([math.exp(each) for each in rates.tolist()], dtype=np.float32),
            decay_bias=self.tensors.plain(prefix + "dt_bias", WeightType.FLOAT32),
            norm=self.tensors.values(prefix + "norm.weight"),
        )

    def _mlp(self, prefix: str, size: int, *, has_bias: bool) -> tuple[Matrix, Matrix]:
        """Weights of gate and up, and of down."""
        names = [f"{prefix}.{name}" for name in self._config.family.gate_up]
        gate_up = self.tensors.matrix(names, [size, size], has_bias=has_bias)
        hidden, depth = [self._config.hidden_size], rounded(size)
        down = self.tensors.matrix([prefix + ".down_proj"], hidden, has_bias=has_bias, depth=depth)
        return gate_up, down

    def _experts(self, prefix: str, names: ExpertNames) -> Experts:
        config = self._config
        count, size, hidden = config.num_experts, config.expert_size, config.hidden_size
        of_each = [
            [prefix + name.format(expert=expert) for name in (names.gate, names.up, names.down)]
            for expert in range(count)
        ]
        gate, up, out = of_each[0]
        gate_up = self.tensors.empty(
            [gate, up], [size, size], hidden, num_outputs=2 * rounded(size), num_experts=count
        )
        down = self.tensors.empty(
            [out], [hidden], rounded(size), num_outputs=hidden, num_experts=count
        )
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
                self.tensors.fill(one_of(whole, expert), own, sizes)
                if whole.bias is not None:
                    self.tensors.fill_bias(whole.bias[expert], own, sizes)
        shared_gate_up = shared_down = shared_gate = None
        if names.shared:
            if names.shared_gate:
                shared_gate = self.tensors.values(f"{prefix}{names.shared_gate}.weight")
            shared_gate_up, shared_down = self._mlp(
                prefix + names.shared, config.shared_expert_size, has_bias=False
            )
        return Experts(
            router=self.tensors.matrix(
                [prefix + names.router],
                [count],
                has_bias=names.has_biases,
                weight_type=self.tensors.other_type,
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
        norms = {
            field: self.tensors.norm(prefix + name) for field, name in BESIDE_MLP_NORMS.items()
        }
        scale = np.float32(self._config.hidden_size**-0.5)
        return BesideMlp(
            router_norm=self.tensors.values(prefix + ROUTER_NORM) * scale,
            factors=self.tensors.values(prefix + EXPERT_FACTORS),
            **norms,
        )

    def embeddings(self) -> BitsArray | Matrix:
        """Those that are not the head's."""
        if self.tensors.linear_type is WeightType.GROUPS:
            name = EMBEDDINGS.removesuffix(".weight")
            return self.tensors.matrix([name], [self._config.vocab_size], has_bias=False)
        return self.tensors.plain(EMBEDDINGS, self.tensors.other_type)
