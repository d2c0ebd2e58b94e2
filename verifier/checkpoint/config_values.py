"""The values of a config.json, with its family's defaults.

What would change the computation and is not known here is refused, never guessed.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from verifier.checkpoint.family import COMMON_DEFAULTS, Family, Windows
from verifier.checkpoint.inert_keys import is_inert
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.weight_types import LANES

# No known model has a tenth of it. Without a bound, a short file would claim all memory.
_MAX_LAYERS = 1000
_LARGEST_NUMBER = (1 << 31) - 1
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_BY_LAYER = "per_layer_config"
_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
FULL, SLIDING, DELTA = "full_attention", "sliding_attention", "linear_attention"
"""Types of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of a layer's attention."""

    head_dim: int
    num_kv_heads: int


class ConfigValues:
    """The values of a config.json, with defaults."""

    def __init__(self, family: Family, content: dict[str, Any]) -> None:
        """Raises: NotServedError: for keys that are not known and not off."""
        self.family = family
        for alias, key in family.aliases.items():
            if alias in content and content.setdefault(key, content[alias]) != content.pop(alias):
                raise NotServedError(f"its config.json tells {alias} and {key} apart")
        self.values = {**COMMON_DEFAULTS, **family.defaults, **content}
        known = {*COMMON_DEFAULTS, *family.defaults, *family.constants, *_SIZES, *_ROPE_KEYS}
        # `quantization_config` reads it.
        known.add("quantization_config")
        if family.has_full_heads:
            known.add(_BY_LAYER)
        if unknown := sorted(
            key for key, value in content.items() if key not in known and not is_inert(key, value)
        ):
            raise NotServedError(f"its config.json has {', '.join(unknown)}")
        for key, value in family.constants.items():
            if self.values.get(key, value) != value:
                raise NotServedError(f"its config.json has {key} {self.values[key]}")

    def number(self, key: str) -> int:
        """Raises: NotServedError: it is missing or no positive whole number."""
        return self._number(key, self.values)

    def _number(self, key: str, values: Mapping[str, Any]) -> int:
        value = values.get(key)
        if type(value) is not int or not 0 < value <= _LARGEST_NUMBER:
            raise NotServedError(f"its config.json has {key} {value}")
        return value

    def factor(self, key: str) -> float:
        """A factor of a family that has multipliers, of another 1.

        Raises:
            NotServedError: it is not positive.
        """
        factor = float(self.values[key]) if self.family.has_multipliers else 1.0
        if not 0.0 < factor < math.inf:
            raise NotServedError(f"its config.json has {key} {factor}")
        return factor

    def norm_eps(self) -> float:
        """Raises: NotServedError: it is not positive as a float32: norms of zeros would fail."""
        eps = float(self.values["rms_norm_eps"])
        if not 0.0 < float(np.float32(eps)) < math.inf:
            raise NotServedError(f"its config.json has rms_norm_eps {eps}")
        return eps

    def flag(self, key: bool | str) -> bool:
        return key if isinstance(key, bool) else bool(self.values[key])

    def heads(self, layer_types: SequenceOf[str]) -> list[Heads]:
        """Each layer's, given the layers' types."""
        num_heads = self.number("num_attention_heads")
        usual = {
            "head_dim": self.values["head_dim"] or self.number("hidden_size") // num_heads,
            "num_key_value_heads": self.values["num_key_value_heads"],
        }
        if usual["num_key_value_heads"] is None:
            usual["num_key_value_heads"] = num_heads
        others = self._other_heads(layer_types) if self.family.has_full_heads else {}
        result = []
        for layer in range(len(layer_types)):
            sizes = {**usual, **others.get(layer, {})}
            heads = Heads(
                head_dim=self._number("head_dim", sizes),
                num_kv_heads=self._number("num_key_value_heads", sizes),
            )
            if heads.head_dim % LANES:
                raise NotServedError(f"head_dim {heads.head_dim} is no multiple of {LANES}")
            if num_heads % heads.num_kv_heads:
                raise NotServedError(f"{num_heads} heads share {heads.num_kv_heads} key heads")
            result.append(heads)
        return result

    def _other_heads(self, layer_types: SequenceOf[str]) -> Mapping[int, Mapping[str, Any]]:
        """What layers have in place of the usual sizes, by their numbers."""
        if _BY_LAYER in self.values:
            # Whatever the other keys say.
            told = {int(layer): own for layer, own in (self.values[_BY_LAYER] or {}).items()}
            known = {"head_dim", "num_key_value_heads"}
            if any(own.keys() - known for own in told.values()):
                raise NotServedError(f"its config.json has {_BY_LAYER} {told}")
            return told
        full = {"head_dim": self.values["global_head_dim"]}
        num_kv_heads = self.values["num_global_key_value_heads"]
        if self.values["attention_k_eq_v"] and num_kv_heads is not None:
            full["num_key_value_heads"] = num_kv_heads
        return {i: full for i, kind in enumerate(layer_types) if kind == FULL}

    def kv_layers(self, layer_types: SequenceOf[str]) -> list[int | None]:
        """The layer whose keys and values each one attends to, if they are not its own: the last
        one of its type that has some.
        """
        num_shared = self.values.get("num_kv_shared_layers") or 0
        if not (type(num_shared) is int and 0 <= num_shared < len(layer_types)):
            raise NotServedError(f"its config.json has num_kv_shared_layers {num_shared}")
        num_own = len(layer_types) - num_shared
        last = {kind: layer for layer, kind in enumerate(layer_types[:num_own])}
        if missing := set(layer_types) - last.keys():
            raise NotServedError(f"layers of type {missing.pop()} without keys and values")
        return [None] * num_own + [last[kind] for kind in layer_types[num_own:]]

    def layer_types(self) -> list[str]:
        """What each layer attends to."""
        num_layers = self.number("num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise CheckpointError(f"num_hidden_layers is {num_layers}, over {_MAX_LAYERS}")
        window = self.values.get("sliding_window")
        # Other families' code does not read it.
        if "use_sliding_window" in self.family.defaults and not self.values["use_sliding_window"]:
            window = None
        windows = self.family.windows
        named = self.values.get("layer_types")
        if named is not None:
            others = DELTA if windows is Windows.DELTA else SLIDING
            if len(named) != num_layers or not set(named) <= {FULL, others}:
                raise NotServedError(f"layers of types {named}")
            if SLIDING in named and window is None:
                raise NotServedError("sliding layers without sliding_window")
            return self._with_last(list(named))
        if windows is Windows.DELTA:
            interval = self.number("full_attention_interval")
            return [DELTA if (layer + 1) % interval else FULL for layer in range(num_layers)]
        if window is None or windows is Windows.NONE:
            return [FULL] * num_layers
        if windows is Windows.NAMED:
            raise NotServedError("sliding_window without layer_types")
        if windows is Windows.EVERY_LAYER:
            return [SLIDING] * num_layers
        if windows is Windows.LAST_LAYERS:
            first = self.values["max_window_layers"]
            return [SLIDING if layer >= first else FULL for layer in range(num_layers)]
        pattern = self.number("sliding_window_pattern")
        return self._with_last(
            [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
        )

    def _with_last(self, layer_types: list[str]) -> list[str]:
        return [*layer_types[:-1], FULL] if self.family.ends_full else layer_types
