"""Grouped-query attention over a read-only cache and the round's new rows."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

SKINNY_ROWS = range(1, 33)
_MASKED = float(jnp.finfo(jnp.float32).min)


def attention(
    q: Float[Array, "B N H E"],
    new: tuple[Float[Array, "B G M E"], Float[Array, "B G M E"]],
    see_new: Bool[Array, "B N M"],
    cached: tuple[Float[Array, "B G S E"], Float[Array, "B G S E"]] | None = None,
    see_cached: Bool[Array, "B N S"] | None = None,
) -> Float[Array, "B N HE"]:
    """One softmax over cached and new keys; the masks say who sees whom (True = sees). The M new keys are those of the
    N rows themselves, or of all rows of a growing tree.

    Slots that no row sees may hold any key, NaN included, and any finite value: scores are replaced, and a weight of
    exactly 0 silences the value. Every row must see at least one key (nodes always see themselves).
    """
    B, N, H, E = q.shape
    G = new[0].shape[1]
    R = H // G
    # The N·R rows that share a kv head are one matrix: a plain batched product, about twice as fast on a CPU.
    rows = q.reshape(B, N, G, R, E).swapaxes(1, 2).reshape(B, G, N * R, E) / math.sqrt(E)
    scores = _scores(rows, new[0], see_new)
    if cached is None:
        mixed = _mix(jax.nn.softmax(scores, axis=-1), new[1])
    else:
        assert see_cached is not None
        S = cached[0].shape[2]
        scores = jnp.concatenate([_scores(rows, cached[0], see_cached), scores], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = _mix(weights[..., :S], cached[1]) + _mix(weights[..., S:], new[1])
    return mixed.reshape(B, G, N, R, E).swapaxes(1, 2).reshape(B, N, H * E).astype(q.dtype)


def _scores(rows: Float[Array, "B G T E"], k: Float[Array, "B G S E"], see: Array) -> Float[Array, "B G T S"]:
    if rows.shape[2] in SKINNY_ROWS and jax.default_backend() == "cpu":
        # As in nn.dense: the long operand on the left, and a barrier so that XLA leaves it there. 10 times faster.
        product = jnp.einsum("BGSE,BGTE->BGST", k, rows, preferred_element_type=jnp.float32)
        scores = lax.optimization_barrier(product).swapaxes(2, 3)
    else:
        scores = jnp.einsum("BGTE,BGSE->BGTS", rows, k, preferred_element_type=jnp.float32)
    see = jnp.repeat(see, rows.shape[2] // see.shape[1], axis=1)[:, None]
    return jnp.where(see, scores, _MASKED)


def _mix(weights: Float[Array, "B G T S"], v: Float[Array, "B G S E"]) -> Float[Array, "B G T E"]:
    return jnp.einsum("BGTS,BGSE->BGTE", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
