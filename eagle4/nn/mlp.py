"""The gated feed-forward layer."""

import jax
from jaxtyping import Array, Float

from eagle4.nn.dense import dense


def swiglu(x: Float[Array, "*T D"], gate: Array, up: Array, down: Array) -> Float[Array, "*T D"]:
    """down · (silu(gate · x) ⊙ up · x) (Shazeer, arXiv 2002.05202)."""
    return dense(jax.nn.silu(dense(x, gate)) * dense(x, up), down)
