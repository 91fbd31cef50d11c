"""Grouped-query attention over a read-only cache and the round's new rows."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_MASKED = float(jnp.finfo(jnp.float32).min)


def attention(
    q: Float[Array, "B N H E"],
    new: tuple[Float[Array, "B G N E"], Float[Array, "B G N E"]],
    see_new: Bool[Array, "B N N"],
    cached: tuple[Float[Array, "B G S E"], Float[Array, "B G S E"]] | None = None,
    see_cached: Bool[Array, "B N S"] | None = None,
) -> Float[Array, "B N HE"]:
    """One softmax over cached and new keys; the masks say who sees whom (True = sees).

    Slots that no row sees may hold NaN: scores are replaced, and values are zeroed since 0 · NaN is NaN. Every row
    must see at least one key (nodes always see themselves).
    """
    B, N, H, E = q.shape
    G = new[0].shape[1]
    q = q.reshape(B, N, G, H // G, E) / math.sqrt(E)
    scores = _scores(q, new[0], see_new)
    if cached is None:
        weights = jax.nn.softmax(scores, axis=-1)
        return _mix(weights, new[1], see_new).reshape(B, N, H * E).astype(q.dtype)
    assert see_cached is not None
    S = cached[0].shape[2]
    scores = jnp.concatenate([_scores(q, cached[0], see_cached), scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = _mix(weights[..., :S], cached[1], see_cached) + _mix(weights[..., S:], new[1], see_new)
    return mixed.reshape(B, N, H * E).astype(q.dtype)


def _scores(q: Array, k: Array, see: Array) -> Float[Array, "B G R N S"]:
    scores = jnp.einsum("BNGRE,BGSE->BGRNS", q, k, preferred_element_type=jnp.float32)
    return jnp.where(see[:, None, None], scores, _MASKED)


def _mix(weights: Array, v: Array, see: Array) -> Float[Array, "B N G R E"]:
    seen = jnp.any(see, axis=1)[:, None, :, None]
    v = jnp.where(seen, v, 0)
    return jnp.einsum("BGRNS,BGSE->BNGRE", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
