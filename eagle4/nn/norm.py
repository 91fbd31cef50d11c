"""Root-mean-square normalisation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*T D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*T D"]:
    """x / rms(x) · weight over the last axis, computed in float32 (Zhang & Sennrich, arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)
