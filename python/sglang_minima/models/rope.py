"""Rotary position embedding: frequencies of every supported scaling, and how configs spell it.

No torch here: frequencies are plain floats (double precision), so that configs stay cheap to read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sglang_minima.models.errors import UnsupportedModel

DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are stretched for contexts longer than the pretrained one."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int
    """Pretrained context length in tokens (not used by "linear")."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are fully stretched."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this over the pretrained context are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are fully stretched."""
    truncate: bool = True
    """yarn: round the ramp's ends to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin (so scores by its square)."""


class Frequencies(NamedTuple):
    """Angles per position of the head_dim / 2 rotation planes, and the factor on cos and sin."""

    inverse: list[float]
    amplitude: float


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """theta and scaling of a config, from `rope_parameters` (transformers 5) or `rope_scaling`.

    Raises:
        UnsupportedModel: a kind other than default, linear, llama3, yarn, or partial rotation.
        KeyError: a parameter that the kind needs is missing.
    """
    raw: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    partial = raw.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise UnsupportedModel(
            "Partial rotary embeddings are not supported; supported is RoPE over the whole head."
        )
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return theta, None
    max_position = int(config["max_position_embeddings"])
    original = int(
        raw.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or max_position
    )
    if kind == "linear":
        return theta, RopeScaling("linear", float(raw["factor"]), original)
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(raw["factor"]),
            original,
            low_freq_factor=float(raw["low_freq_factor"]),
            high_freq_factor=float(raw["high_freq_factor"]),
        )
    if kind == "yarn":
        factor = float(raw.get("factor") or max_position / original)
        return theta, RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=float(raw.get("beta_fast") or 32.0),
            beta_slow=float(raw.get("beta_slow") or 1.0),
            truncate=bool(raw.get("truncate", True)),
            attention_factor=_yarn_attention_factor(raw, factor),
        )
    raise UnsupportedModel(
        f"RoPE type {kind} is not supported; supported are default, linear, llama3 and yarn."
    )


def scaled_max_position(max_position: int, scaling: RopeScaling | None) -> int:
    """Context length that the scaling is meant for.

    "linear" configs state the unstretched length; llama3 configs the stretched one; yarn configs
    are found with either, so the longer of the two readings holds.
    """
    if scaling is None or scaling.kind == "llama3":
        return max_position
    if scaling.kind == "linear":
        return int(max_position * scaling.factor)
    return max(max_position, int(scaling.original_max_position * scaling.factor))


def frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> Frequencies:
    """Inverse frequencies of RoPE (Su et al. 2021) under a scaling.

    Sources: linear: position interpolation (Chen et al. 2023); yarn: Peng et al. 2023,
    section 3.2 and appendix; llama3: the Llama 3.1 release.
    """
    base = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return Frequencies(base, 1.0)
    if scaling.kind == "linear":
        return Frequencies([f / scaling.factor for f in base], 1.0)
    if scaling.kind == "llama3":
        return Frequencies([_llama3(f, scaling) for f in base], 1.0)
    return Frequencies(_yarn(base, theta, head_dim, scaling), scaling.attention_factor)


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    # Rotations over the pretrained context: few = long wavelength = stretched.
    rotations = scaling.original_max_position * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = min(max((rotations - low) / (high - low), 0.0), 1.0)
    return frequency * (keep + (1 - keep) / scaling.factor)


def _yarn(base: list[float], theta: float, head_dim: int, scaling: RopeScaling) -> list[float]:
    def dimension(rotations: float) -> float:
        """The (fractional) plane that makes so many rotations over the pretrained context."""
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    stretched = []
    for plane, frequency in enumerate(base):
        interpolate = min(max((plane - low) / width, 0.0), 1.0)
        stretched.append(frequency * (1 - interpolate + interpolate / scaling.factor))
    return stretched


def _yarn_attention_factor(raw: Mapping[str, Any], factor: float) -> float:
    given = raw.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = raw.get("mscale"), raw.get("mscale_all_dim")
    if weight and weight_all:
        return mscale(float(weight)) / mscale(float(weight_all))
    return mscale(1.0)
