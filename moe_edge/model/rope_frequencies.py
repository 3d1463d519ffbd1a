"""Frequencies of rotary position embedding and its context extensions; no JAX.

Sources: RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071 (section 3.2, with the
rounding that DeepSeek and gpt-oss checkpoints were trained with); LongRoPE, arXiv
2402.13753, of sequences within the original context; the llama3 rule as published with
Llama 3.1.
"""

import math

import numpy as np

from moe_edge.model.attention_config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Angle per position of each rotated pair, float32 `[dim / 2]`."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    base = 1.0 / (np.float32(rope.theta) ** exponents)
    if rope.kind == "longrope":
        base = base / np.asarray(rope.factors, np.float32)
    elif rope.kind == "linear":
        base = base / rope.factor
    elif rope.kind == "proportional":
        base = base / rope.factor * (np.arange(len(base)) < rope.turning)
    elif rope.kind == "yarn":
        base = _yarn(rope, base)
    elif rope.kind == "llama3":
        base = _llama3(rope, base)
    return base.astype(np.float32)


def _yarn(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Interpolates slow dimensions, keeps fast ones, ramps linearly in between."""

    def dimension_of(rotations: float) -> float:
        length = rope.original_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    return base / rope.factor * (1.0 - keep) + base * keep


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Divides low frequencies by `factor`, blends the middle band."""
    wavelength = 2 * math.pi / base
    low = rope.original_positions / rope.low_freq_factor
    high = rope.original_positions / rope.high_freq_factor
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    middle = (1 - blend) * base / rope.factor + blend * base
    scaled = np.where(wavelength > low, base / rope.factor, base)
    return np.where((wavelength <= low) & (wavelength >= high), middle, scaled)
