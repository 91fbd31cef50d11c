"""Rotary position embedding and its long-context variants.

Pairs are (i, i + E/2), the layout of safetensors checkpoints. GGUF's interleaved layout is undone by its reader.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from eagle4.specs import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular step per position for each of the E/2 pairs (float32, computed once on the host), and the factor on
    cos and sin (1 except for yarn).

    none: no rotation. default: RoFormer, arXiv 2104.09864 eq. 15. linear: positions divided by the factor. llama3:
    high frequencies kept, low ones divided, a linear blend between (Llama 3.1 model card). yarn: arXiv 2309.00071
    §3.2 and §3.4.
    """
    pairs = np.arange(0, head_dim, 2, dtype=np.float64)
    if rope.kind == "none":
        return np.zeros(len(pairs), np.float32), 1.0
    base = rope.theta ** (-pairs / head_dim)
    if rope.kind == "linear":
        return (base / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope).astype(np.float32), 1.0
    if rope.kind == "yarn":
        default_scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
        scale = default_scale if rope.attention_factor is None else rope.attention_factor
        return _yarn(base, rope, head_dim).astype(np.float32), scale
    return base.astype(np.float32), 1.0


def _llama3(base: np.ndarray, rope: RopeSpec) -> np.ndarray:
    turns = rope.original_max_position * base / (2 * math.pi)
    keep = np.clip(
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor),
        0.0,
        1.0,
    )
    return keep * base + (1 - keep) * base / rope.factor


def _yarn(base: np.ndarray, rope: RopeSpec, head_dim: int) -> np.ndarray:
    def pair_with_turns(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)
    interpolate = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return interpolate * base / rope.factor + (1 - interpolate) * base


def rotation(
    positions: Int32[Array, "B N"], rope: RopeSpec, head_dim: int
) -> tuple[Float[Array, "B N 1 E2"], Float[Array, "B N 1 E2"]]:
    """cos and sin for the given positions, in float32, with an axis to broadcast over heads."""
    frequency, scale = inverse_frequencies(rope, head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: Float[Array, "B N H E"], cos: Array, sin: Array) -> Float[Array, "B N H E"]:
    """Rotate each (i, i + E/2) pair of every head by its position's angle."""
    x32 = x.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
