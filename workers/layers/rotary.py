"""Tables of cosines and sines of every position, for each kind of RoPE scaling.

Formulas: default (RoFormer, arXiv 2104.09864), linear (position interpolation), llama3 (Llama 3.1), yarn (arXiv
2309.00071), longrope (Phi-3), dynamic (NTK), divided (GGUF's, a factor for each frequency), proportional (only the
first pairs are rotated). The base of dynamic and the factors of longrope are those of the longest context that may be
served, so that a token's key does not depend on how long its request grows. All in float32, as in transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ipc.errors import ConfigError
from ...ipc.spec.models.model_config import ModelConfig, RopeConfig
from ...kernels.contract import Rotary


def make_rotary(config: ModelConfig, rope: RopeConfig, max_model_len: int, device: torch.device) -> Rotary:
    """Compute the cosines and sines of each position in [0, max_model_len), multiplied by the magnitude of `rope`, and
    the factors of the queries if the model scales them. ConfigError if the kind of `rope` is not supported or one of
    its parameters is missing or invalid."""
    rotary_dim = rope.rotary_dim or config.head_dim
    frequencies, magnitude = rotary_frequencies(rope, rotary_dim, config.max_position_embeddings, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(magnitude).to(device)
    if config.query_scaling is None:
        return Rotary(cos_sin)
    factor, length = config.query_scaling
    return Rotary(cos_sin, (1 + factor * torch.log(1 + (positions / length).floor())).to(device))


def section_axes(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Return, for each pair of elements, the kind of position that rotates it: time (0), row (1) or column (2).
    [rotary_dim / 2] int64."""
    if not rope.is_interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
    axes = torch.zeros(rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


def rotations_at(positions: Tensor, axes: Tensor, cos_sin: Tensor) -> Tensor:
    """Return the cosines and sines [T, rotated] of tokens at `positions` [3, T] int64: their times, rows and columns.
    axes: from `section_axes`. cos_sin: [P, rotated], the table by position from which they are taken."""
    places = positions[axes].T  # [T, rotated / 2]
    cos, sin = cos_sin.chunk(2, dim=-1)
    return torch.cat((cos.gather(0, places), sin.gather(0, places)), dim=-1)


def rotary_frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[Tensor, float]:
    """Return the radians per position of each of the head_dim / 2 pairs (float32), and the factor of cosines and sines.
    ConfigError if the kind is not supported or a parameter is missing or invalid."""
    if rope.kind == "linear":
        return _inverse_powers(rope.theta, head_dim) / _number(rope, "factor"), 1.0
    if rope.kind == "dynamic":
        return _inverse_powers(_dynamic_theta(rope, head_dim, max_position_embeddings, max_model_len), head_dim), 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, head_dim, max_position_embeddings), 1.0
    if rope.kind == "yarn":
        factor = _yarn_factor(rope, max_position_embeddings)
        return _yarn_frequencies(rope, head_dim, max_position_embeddings, factor), _yarn_magnitude(rope, factor)
    if rope.kind == "longrope":
        original_length = _number(rope, "original_max_position_embeddings", max_position_embeddings)
        name = "long_factor" if max_model_len > original_length else "short_factor"
        frequencies = _inverse_powers(rope.theta, head_dim) / _factors(rope, name, head_dim)
        factor = _number(rope, "factor", max_position_embeddings / original_length)
        return frequencies, _longrope_magnitude(rope, factor, original_length)
    if rope.kind == "divided":
        return _inverse_powers(rope.theta, head_dim) / _factors(rope, "factors", head_dim), 1.0
    if rope.kind == "proportional":
        frequencies = _inverse_powers(rope.theta, head_dim)
        num_turning = int(_number(rope, "partial_rotary_factor") * head_dim // 2)
        return torch.where(torch.arange(head_dim // 2) < num_turning, frequencies, 0.0), 1.0
    if rope.kind == "default":
        return _inverse_powers(rope.theta, head_dim), 1.0
    raise ConfigError(f"config.json: rope type {rope.kind} is not supported")


def _inverse_powers(theta: float, head_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _dynamic_theta(rope: RopeConfig, head_dim: int, max_position_embeddings: int, max_model_len: int) -> float:
    factor = _number(rope, "factor")
    if rope.parameters.get("alpha"):  # Hunyuan: the same base at every length
        return float(rope.theta * _number(rope, "alpha") ** (head_dim / (head_dim - 2)))
    stretch = max(max_model_len, max_position_embeddings) / max_position_embeddings
    return float(rope.theta * (factor * stretch - (factor - 1)) ** (head_dim / (head_dim - 2)))


def _llama3_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> Tensor:
    """Return frequencies: those of long waves divided by `factor`, those of short waves unchanged, interpolated
    between."""
    frequencies = _inverse_powers(rope.theta, head_dim)
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    original_length = _number(rope, "original_max_position_embeddings", max_position_embeddings)
    wavelengths = 2 * math.pi / frequencies
    keep = ((original_length / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn_factor(rope: RopeConfig, max_position_embeddings: int) -> float:
    original_length = _number(rope, "original_max_position_embeddings", max_position_embeddings)
    return _number(rope, "factor", max_position_embeddings / original_length)


def _yarn_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int, factor: float) -> Tensor:
    """Return frequencies: unchanged before a linear ramp over the dimensions, divided by `factor` after it, mixed on
    it."""
    original_length = _number(rope, "original_max_position_embeddings", max_position_embeddings)

    def dimension_of(num_rotations: float) -> float:
        wave = original_length / (num_rotations * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension_of(_number(rope, "beta_fast", 32.0)), dimension_of(_number(rope, "beta_slow", 1.0))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - ramp.clamp(0, 1)
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # / 2π
    return 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _yarn_magnitude(rope: RopeConfig, factor: float) -> float:
    """Return `attention_factor` if it is given; else the paper's value for `factor`, or, with `mscale` and
    `mscale_all_dim`, the ratio of the values for both."""
    given = rope.parameters.get("attention_factor")
    if given is not None:
        return _number(rope, "attention_factor")

    def suggested(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return suggested(mscale) / suggested(mscale_all_dim)
    return suggested(1.0)


def _longrope_magnitude(rope: RopeConfig, factor: float, original_length: float) -> float:
    """Return `attention_factor` if it is given; else √(1 + ln factor / ln original length) (LongRoPE, arXiv
    2402.13753), and 1 for a factor up to 1."""
    if rope.parameters.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    return math.sqrt(1 + math.log(factor) / math.log(original_length)) if factor > 1 else 1.0


def _factors(rope: RopeConfig, name: str, head_dim: int) -> Tensor:
    factors = rope.parameters.get(name)
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        raise ConfigError(f"config.json: rope type {rope.kind} needs {head_dim // 2} numbers {name}")
    return torch.tensor(factors, dtype=torch.float32)


def _number(rope: RopeConfig, name: str, default: float | None = None) -> float:
    value = rope.parameters.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"config.json: rope type {rope.kind} needs the number {name}, it is {value!r}")
    return float(value)
