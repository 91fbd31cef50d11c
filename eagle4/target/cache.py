"""The committed cache: allocate, write accepted rows, gather a path."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from eagle4.specs import ModelSpec
from eagle4.types import KVCache


def allocate(spec: ModelSpec, batch: int, capacity: int, dtype: jnp.dtype | type = jnp.float32) -> KVCache:
    """An empty cache with `capacity` slots per row."""
    shape = (batch, spec.num_kv_heads, capacity, spec.head_dim)
    empty = tuple(jnp.zeros(shape, dtype) for _ in range(spec.num_layers))
    return KVCache(
        k=empty, v=tuple(jnp.zeros(shape, dtype) for _ in empty), length=jnp.zeros(batch, jnp.int32)
    )


def gather_path(rows: Float[Array, "B G N E"], path: Int32[Array, "B P"]) -> Float[Array, "B G P E"]:
    """The rows of a path's nodes, in path order; entries of −1 give zeros."""
    index = jnp.maximum(path, 0)[:, None, :, None]
    picked = jnp.take_along_axis(rows, index, axis=2)
    return jnp.where((path >= 0)[:, None, :, None], picked, 0)


def write(
    cache: KVCache,
    k: tuple[Float[Array, "B G P E"], ...],
    v: tuple[Float[Array, "B G P E"], ...],
    count: Int32[Array, " B"],
) -> KVCache:
    """Append each row's first `count` entries at its own length; the rest of the P rows leaves no trace.

    The caller keeps length + P ≤ S (checked on the host by `decode.check_room`): `dynamic_update_slice` would clamp
    the start silently and overwrite committed entries.
    """
    P = k[0].shape[2]
    keep = (jnp.arange(P) < count[:, None])[:, None, :, None]

    def append(slots: Array, rows: Array) -> Array:
        rows = jnp.where(keep, rows, 0).astype(slots.dtype)
        if slots.shape[0] == 1:
            return lax.dynamic_update_slice(slots, rows, (0, 0, cache.length[0], 0))
        return jax.vmap(lambda s, r, start: lax.dynamic_update_slice(s, r, (0, start, 0)))(
            slots, rows, cache.length
        )

    return KVCache(
        k=tuple(map(append, cache.k, k)), v=tuple(map(append, cache.v, v)), length=cache.length + count
    )
