"""Rotary embeddings as transformers derives them from a configuration.

In float32, operation by operation, since models were trained with these values. Only powers are
computed in float64 and rounded: numpy's float32 powers differ between processors.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from verifier.checkpoint.refusals import NotServedError
from verifier.checkpoint.weight_types import FloatArray, Rotary

# Keys of each type that decide something; any other one is refused.
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    # Of part of a head: the other pairs stay, but they are counted.
    "proportional": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "original_max_position_embeddings",
    },
    "longrope": {
        "factor",
        "attention_factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
    },
}
# The first name of longrope.
_KEYS["su"] = _KEYS["longrope"]
_ALL_TYPES = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rotary(parameters: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int) -> Rotary:
    """The embedding that `rope_parameters` of one layer type describe.

    Args:
        parameters: with `rope_theta`; `partial_rotary_factor` if it is not 1.

    Raises:
        NotServedError: a type or key that is not known here.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KEYS:
        raise NotServedError(f"rotary embeddings of type {kind}")
    given = {key: value for key, value in parameters.items() if value is not None}
    if unknown := given.keys() - _ALL_TYPES - _KEYS[kind]:
        raise NotServedError(f"rotary embeddings with {', '.join(sorted(unknown))}")
    try:
        if kind == "proportional":
            return _proportional(head_dim, given)
        dim = int(head_dim * float(given.get("partial_rotary_factor", 1.0)))
        if dim % 2 or not 0 < dim <= head_dim:
            raise NotServedError(f"rotary embeddings of {dim} dimensions")
        theta = float(given["rope_theta"])
        if kind == "linear":
            return Rotary(inv_freq=_inv_freq(theta, dim) / np.float32(given["factor"]))
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
        if kind == "llama3":
            return Rotary(inv_freq=_llama3(_inv_freq(theta, dim), given))
        if kind == "yarn":
            return _yarn(theta, dim, given)
        if kind in ("longrope", "su"):
            return _longrope(_powers(theta, dim), given, max_position_embeddings)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise NotServedError(f"rotary embeddings of type {kind}: {error!r}") from error
    return Rotary(inv_freq=_inv_freq(theta, dim))


def _proportional(head_dim: int, given: Mapping[str, Any]) -> Rotary:
    share = float(given.get("partial_rotary_factor", 1.0))
    if not 0 <= share <= 1:
        raise NotServedError(f"rotary embeddings of {share} of a head")
    inv_freq = np.zeros(head_dim // 2, dtype=np.float32)
    num_rotated = int(share * head_dim // 2)
    inv_freq[:num_rotated] = _inv_freq(float(given["rope_theta"]), head_dim)[:num_rotated]
    return Rotary(inv_freq=inv_freq / np.float32(given.get("factor", 1.0)))


def _powers(theta: float, dim: int) -> FloatArray:
    """Theta ** (i / dim) for even i < dim."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.array([math.pow(theta, each) for each in exponents.tolist()], dtype=np.float32)


def _inv_freq(theta: float, dim: int) -> FloatArray:
    return np.float32(1.0) / _powers(theta, dim)


def _llama3(inv_freq: FloatArray, given: Mapping[str, Any]) -> FloatArray:
    """Long wavelengths are divided by a factor, short ones kept, those between blended."""
    factor, length = np.float32(given["factor"]), given["original_max_position_embeddings"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    wavelength = np.float32(2 * math.pi) / inv_freq
    scaled = np.where(wavelength > length / low, inv_freq / factor, inv_freq)
    smooth = (np.float32(length) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = (wavelength >= length / high) & (wavelength <= length / low)
    result: FloatArray = np.where(is_between, blended, scaled).astype(np.float32)
    return result


def _longrope(powers: FloatArray, given: Mapping[str, Any], max_position_embeddings: int) -> Rotary:
    """Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024."""
    length = given["original_max_position_embeddings"]
    if type(length) is not int or length < 1:
        raise NotServedError(f"rotary embeddings with original_max_position_embeddings {length}")

    def scaled(key: str) -> FloatArray:
        factors = np.array(given[key], dtype=np.float32)
        if factors.shape != powers.shape or not (np.isfinite(factors) & (factors > 0)).all():
            raise NotServedError(f"rotary embeddings whose {key} is not {len(powers)} factors")
        return np.float32(1.0) / (factors * powers)

    scaling = given.get("attention_factor")
    if scaling is None:
        factor = float(given.get("factor", max_position_embeddings / length))
        scaling = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return Rotary(
        inv_freq=scaled("short_factor"),
        scaling=float(scaling),
        long_inv_freq=scaled("long_factor"),
        max_short_tokens=length,
    )


def _yarn(theta: float, dim: int, given: Mapping[str, Any]) -> Rotary:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023."""
    factor = float(given["factor"])

    def dimension_of(num_rotations: float) -> float:
        length = given["original_max_position_embeddings"]
        return dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(scale: float, by: float = 1.0) -> float:
        return 0.1 * by * math.log(scale) + 1.0 if scale > 1 else 1.0

    low = dimension_of(given.get("beta_fast") or 32)
    high = dimension_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    powers = _powers(theta, dim)
    one = np.float32(1.0)
    inv_freq = (one / (np.float32(factor) * powers)) * (1 - kept) + (one / powers) * kept
    scaling = given.get("attention_factor")
    if scaling is None:
        by, by_all = given.get("mscale"), given.get("mscale_all_dim")
        scaling = magnitude(factor)
        if by and by_all:
            scaling = magnitude(factor, by) / magnitude(factor, by_all)
    return Rotary(inv_freq=inv_freq.astype(np.float32), scaling=float(scaling))
