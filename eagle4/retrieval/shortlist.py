"""Candidates from coarse scores: exactly, or nearly so and faster; then exact logits for them alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from eagle4.nn.dense import dense
from eagle4.retrieval.factors import Factors

Select = Callable[[Float[Array, "*T V"], int], Int32[Array, "*T C"]]


def exact(scores: Float[Array, "*T V"], count: int) -> Int32[Array, "*T C"]:
    """The `count` best, best first."""
    return lax.top_k(scores, count)[1]


def blocked(scores: Float[Array, "*T V"], count: int, blocks: int = 64) -> Int32[Array, "*T C"]:
    """The best of each block of neighbours, then the best of those: exact unless one block holds more than its share.

    Each of the `blocks` blocks may send twice its even share of `count`.
    """
    each = min(max(2 * count // blocks, 1), -(-scores.shape[-1] // blocks))
    rows = _padded(scores, blocks).reshape(*scores.shape[:-1], blocks, -1)
    best, place = lax.top_k(rows, each)
    ids = place + jnp.arange(blocks)[:, None] * rows.shape[-1]
    return _best_of(best, ids, count)


def strided(scores: Float[Array, "*T V"], count: int, buckets: int = 4096) -> Int32[Array, "*T C"]:
    """The maximum of every stride of the vocabulary, then the best of those: no sorting but of the buckets' maxima.

    Bucket b holds ids b, b + buckets, …; two good candidates in one bucket lose one. Neighbours in id, often alike in
    frequency, fall into different buckets.
    """
    buckets = max(buckets, count)
    columns = jnp.swapaxes(_padded(scores, buckets).reshape(*scores.shape[:-1], -1, buckets), -1, -2)
    place = jnp.argmax(columns, axis=-1).astype(jnp.int32)
    best = jnp.max(columns, axis=-1)
    ids = place * buckets + jnp.arange(buckets, dtype=jnp.int32)
    return _best_of(best[..., None], ids[..., None], count)


SELECTIONS: dict[str, Select] = {"exact": exact, "blocked": blocked, "strided": strided}


def shortlist(
    factors: Factors, state: Float[Array, "*T D"], count: int, select: Select = exact
) -> Int32[Array, "*T C"]:
    """Ids of the `count` head rows that score best by the factors."""
    coarse = dense(dense(state, factors.down), factors.up)
    # Without the barrier XLA:CPU fuses the selection into the product and takes thirty times as long.
    return select(lax.optimization_barrier(coarse.astype(jnp.float32)), count)


def rescored(
    head: Float[Array, "V D"], state: Float[Array, "*T D"], ids: Int32[Array, "*T C"]
) -> Float[Array, "*T C"]:
    """Exact logits of the given rows, accumulated in float32."""
    rows = jnp.take(head, ids, axis=0)
    return jnp.einsum("...CD,...D->...C", rows, state, preferred_element_type=jnp.float32)


def retrieve(
    factors: Factors,
    head: Float[Array, "V D"],
    state: Float[Array, "*T D"],
    count: int,
    select: Select = exact,
) -> tuple[Int32[Array, "*T C"], Float[Array, "*T C"]]:
    """The shortlist and q over it: a softmax of the exact logits, which is zero everywhere else."""
    with jax.named_scope("retrieve"):
        ids = shortlist(factors, state, count, select)
        return ids, jax.nn.softmax(rescored(head, state, ids), axis=-1)


def _padded(scores: Float[Array, "*T V"], multiple: int) -> Array:
    short = -scores.shape[-1] % multiple
    return jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, short)], constant_values=-jnp.inf)


def _best_of(best: Array, ids: Array, count: int) -> Int32[Array, "*T C"]:
    flat = best.reshape(*best.shape[:-2], -1)
    _, place = lax.top_k(flat, count)
    return jnp.take_along_axis(ids.reshape(flat.shape), place, axis=-1).astype(jnp.int32)
