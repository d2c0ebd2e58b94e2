"""Loads the weights of a checkpoint's decoder to a device.

weights = load_weights(describe_decoder(folder), dtype="auto", device=device)
"""

import torch

from verifier.checkpoint.delta_shape import DeltaShape
from verifier.checkpoint.description import (
    BESIDE_MLP_NORMS,
    EMBEDDINGS,
    EXPERT_FACTORS,
    HEAD,
    LAYER_SCALAR,
    PER_LAYER_EMBEDDINGS,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    ROUTER_NORM,
    DecoderDescription,
    qkv_names,
    qkv_sizes,
    reopened,
)
from verifier.checkpoint.family import ExpertNames
from verifier.checkpoint.model_config import LayerConfig, ModelConfig
from verifier.checkpoint.weight_types import Rotary
from verifier.gpu.groups import GroupedWeight
from verifier.gpu.loading.delta_outputs import delta_outputs
from verifier.gpu.loading.device_tensors import TORCH_DTYPES, DeviceTensors, Modules, Outputs
from verifier.gpu.operations import Operations, operations_for
from verifier.gpu.weights import (
    BesideMlp,
    DeltaNet,
    Experts,
    ExpertWeights,
    GpuWeights,
    Layer,
    LayerInput,
    Linear,
    Mlp,
    PerLayerInputs,
)


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
    with reopened(described) as files:
        files.log_rounding(described.other_type(dtype))
        tensors = DeviceTensors(
            files,
            dtype=torch_dtype,
            device=device,
            operations=operations,
            is_fp8=quantization == "fp8",
            norm_offset=config.family.norm_offset,
        )
        loader = _Loader(tensors, config)
        shape = config.vocab_size, config.hidden_size
        embeddings = tensors.matrix([EMBEDDINGS.removesuffix(".weight")], shape)
        head = embeddings
        if not config.ties_embeddings:
            head = tensors.matrix([HEAD.removesuffix(".weight")], shape)
        return GpuWeights(
            config=config,
            operations=operations,
            dtype=torch_dtype,
            device=device,
            embeddings=embeddings,
            head=head,
            final_norm=tensors.norm("model.norm"),
            per_layer_inputs=loader.per_layer_inputs(),
            layers=[loader.layer(index, layer) for index, layer in enumerate(config.layers)],
            inv_freqs=[_inv_freq(rotary).to(device) for rotary in config.rotaries],
        )


class _Loader:
    """Reads layers of one checkpoint."""

    def __init__(self, tensors: DeviceTensors, config: ModelConfig) -> None:
        self._tensors = tensors
        self._config = config

    def layer(self, index: int, layer: LayerConfig) -> Layer:
        config, family, tensors = self._config, self._config.family, self._tensors
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        hidden = config.hidden_size
        norms = {field: tensors.norm(prefix + name) for field, name in family.norms.items()}
        delta = qkv = gates = head_norms = sinks = None
        if layer.is_delta:
            assert config.delta is not None
            prefix_of_output = prefix + "linear_attn."
            delta = self._delta(prefix_of_output, config.delta)
            output = tensors.linear(
                [prefix_of_output + "out_proj"],
                (hidden, config.delta.num_value_heads * config.delta.value_dim),
            )
        else:
            qkv, gates = self._qkv(attention, layer)
            head_norms = self._head_norms(attention, layer)
            sinks = tensors.values(attention + "sinks") if family.has_sinks else None
            output = tensors.linear(
                [attention + "o_proj"],
                (hidden, config.num_heads * layer.head_dim),
                has_bias=config.has_output_bias,
            )
        return Layer(
            input_norm=norms.get("input_norm"),
            delta=delta,
            qkv=qkv,
            gates=gates,
            head_norms=head_norms,
            sinks=sinks,
            output=output,
            attention_output_norm=norms.get("attention_output_norm"),
            mlp_output_norm=norms.get("mlp_output_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp=(
                self._experts(prefix, layer)
                if layer.has_experts
                else self._mlp(prefix + "mlp", layer.intermediate_size, config.has_mlp_bias)
            ),
            layer_input=self._layer_input(prefix) if config.per_layer_input_size else None,
            scale=(tensors.number(prefix + LAYER_SCALAR) if family.has_layer_scalars else 1.0),
            sliding_window=layer.sliding_window or None,
            rotary=layer.rotary,
        )

    def _qkv(self, attention: str, layer: LayerConfig) -> tuple[Linear, Linear | None]:
        """Queries, keys and values; and gates, whose rows are behind each head's of the query."""
        config, size = self._config, layer.head_dim
        names = [attention + name for name in qkv_names(config, layer)]
        num_outputs, bias = sum(qkv_sizes(config, layer)), config.has_qkv_bias
        if not config.family.gates_attention:
            shape = num_outputs, config.hidden_size
            return self._tensors.linear(names, shape, has_bias=bias), None
        queries, gates = (
            [Outputs(names[0], (2 * head + part) * size, size) for head in range(config.num_heads)]
            for part in (0, 1)
        )
        num_gates = config.num_heads * size
        shape = num_outputs - num_gates, config.hidden_size
        return (
            self._tensors.linear([*queries, *names[1:]], shape, has_bias=bias),
            self._tensors.linear(gates, (num_gates, config.hidden_size), has_bias=bias),
        )

    def _delta(self, prefix: str, shape: DeltaShape) -> DeltaNet:
        tensors, hidden = self._tensors, self._config.hidden_size
        inputs, numbers = delta_outputs(prefix, shape)
        num_values = shape.num_value_heads * shape.value_dim
        convolution = tensors.exact_values(prefix + "conv1d.weight")
        return DeltaNet(
            inputs=tensors.linear(inputs, (shape.num_channels + num_values, hidden)),
            numbers=tensors.linear(numbers, (2 * shape.num_value_heads, hidden)),
            convolution=convolution.flatten(1).T.contiguous(),
            decay_rate=tensors.exact_values(prefix + "A_log").exp(),
            decay_bias=tensors.exact_values(prefix + "dt_bias"),
            norm=tensors.values(prefix + "norm.weight"),
        )

    def per_layer_inputs(self) -> PerLayerInputs | None:
        config, tensors = self._config, self._tensors
        size = config.per_layer_input_size
        if not size:
            return None
        num_outputs = len(config.layers) * size
        return PerLayerInputs(
            size=size,
            embeddings=tensors.matrix(
                [PER_LAYER_EMBEDDINGS.removesuffix(".weight")],
                (config.per_layer_vocab_size, num_outputs),
            ),
            projection=tensors.linear([PER_LAYER_PROJECTION], (num_outputs, config.hidden_size)),
            norm=tensors.norm(PER_LAYER_NORM),
        )

    def _layer_input(self, prefix: str) -> LayerInput:
        hidden, size = self._config.hidden_size, self._config.per_layer_input_size
        return LayerInput(
            gate=self._tensors.linear([prefix + "per_layer_input_gate"], (size, hidden)),
            down=self._tensors.linear([prefix + "per_layer_projection"], (hidden, size)),
            norm=self._tensors.norm(prefix + "post_per_layer_input_norm"),
        )

    def _head_norms(self, attention: str, layer: LayerConfig) -> torch.Tensor | None:
        """As in `Layer`."""
        family = self._config.family
        if not family.has_query_key_norms:
            return None
        counts = [self._config.num_heads, layer.num_kv_heads if layer.has_kv else 0]
        # Of one head, which all have; or of each.
        norms = [
            self._tensors.norm(attention + name).view(-1, layer.head_dim).expand(count, -1)
            for name, count in zip(("q_norm", "k_norm"), counts, strict=True)
            if count
        ]
        if family.norms_values and layer.has_kv:
            norms.append(torch.ones_like(norms[1]))
        return torch.cat(norms)

    def _mlp(self, prefix: str, size: int, has_bias: bool) -> Mlp:
        config = self._config
        hidden = config.hidden_size
        return Mlp(
            gate_up=self._tensors.linear(
                [f"{prefix}.{name}" for name in config.family.gate_up],
                (2 * size, hidden),
                has_bias=has_bias,
            ),
            down=self._tensors.linear([prefix + ".down_proj"], (hidden, size), has_bias=has_bias),
        )

    def _experts(self, prefix: str, layer: LayerConfig) -> Experts:
        config, names = self._config, self._config.family.experts
        assert names is not None
        beside_mlp = shared = shared_gate = None
        if names.is_beside_mlp:
            assert names.shared is not None
            beside_mlp = self._beside_mlp(prefix, prefix + names.shared, layer.intermediate_size)
        elif names.shared:
            shared = self._mlp(prefix + names.shared, config.shared_expert_size, False)
            gate = [prefix + names.shared_gate]
            shared_gate = self._tensors.linear(gate, (1, config.hidden_size))
        return Experts(
            router=self._tensors.linear(
                [prefix + names.router],
                (config.num_experts, config.hidden_size),
                has_bias=names.has_biases,
            ),
            weights=self._expert_weights(prefix, names),
            num_per_token=config.num_experts_per_token,
            normalises=config.normalises_experts,
            beside_mlp=beside_mlp,
            shared=shared,
            shared_gate=shared_gate,
        )

    def _beside_mlp(self, prefix: str, mlp: str, size: int) -> BesideMlp:
        tensors = self._tensors
        return BesideMlp(
            mlp=self._mlp(mlp, size, False),
            router_norm=tensors.values(prefix + ROUTER_NORM) * self._config.hidden_size**-0.5,
            factors=tensors.values(prefix + EXPERT_FACTORS),
            **{field: tensors.norm(prefix + name) for field, name in BESIDE_MLP_NORMS.items()},
        )

    def _expert_weights(self, prefix: str, names: ExpertNames) -> ExpertWeights:
        hidden, size = self._config.hidden_size, self._config.expert_size
        count, tensors = self._config.num_experts, self._tensors
        of_each = [
            [prefix + name.format(expert=expert) for name in (names.gate, names.up, names.down)]
            for expert in range(count)
        ]

        def stacked(
            of_experts: list[Modules], shape: tuple[int, int]
        ) -> torch.Tensor | GroupedWeight:
            of_all = [module for modules in of_experts for module in modules]
            if (kept := tensors.grouped(of_all, (count, *shape))) is not None:
                return kept
            weight = tensors.empty(count, *shape)
            for own, modules in zip(weight, of_experts, strict=True):
                tensors.fill(own, modules)
            return weight

        def biases(of_experts: list[Modules], num_outputs: int) -> torch.Tensor | None:
            if not names.has_biases:
                return None
            return torch.stack([tensors.bias(modules, num_outputs) for modules in of_experts])

        gate_ups: list[Modules] = [own[:2] for own in of_each]
        downs: list[Modules] = [own[2:] for own in of_each]
        return ExpertWeights(
            gate_up=stacked(gate_ups, (2 * size, hidden)),
            down=stacked(downs, (hidden, size)),
            gate_up_bias=biases(gate_ups, 2 * size),
            down_bias=biases(downs, hidden),
        )


def _inv_freq(rotary: Rotary) -> torch.Tensor:
    """As in `GpuWeights`."""
    kinds = [each for each in (rotary.inv_freq, rotary.long_inv_freq) if each is not None]
    return torch.stack([torch.from_numpy(each) for each in kinds])
