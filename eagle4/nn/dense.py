"""Matrix products with a few rows.

Weights are kept [out, in]. XLA:CPU is slow at `x[T, in] · Wᵀ` for 2 ≤ T ≤ 64; with the weights as the left operand
the same product takes about half the time. The barrier keeps XLA from swapping the operands back. Accelerators, one
row and many rows want the ordinary form. `experiments.calibrate` prints what this buys on a machine.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

SKINNY_ROWS = range(2, 65)


def dense(
    x: Float[Array, "*T I"], weight: Float[Array, "O I"], bias: Float[Array, " O"] | None = None
) -> Array:
    """x · weightᵀ + bias over the last axis, accumulated in float32, returned in the dtype of x.

    The orientation is chosen from the static row count, so it costs nothing at run time.
    """
    rows = math.prod(x.shape[:-1])
    if rows in SKINNY_ROWS and jax.default_backend() == "cpu":
        flat = x.reshape(rows, x.shape[-1])
        product = jnp.einsum("OI,TI->OT", weight, flat, preferred_element_type=jnp.float32)
        y = lax.optimization_barrier(product).T.reshape(*x.shape[:-1], weight.shape[0])
    else:
        y = jnp.einsum("...I,OI->...O", x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)
