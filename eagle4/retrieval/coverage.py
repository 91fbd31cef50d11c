"""How much of what the full head says a shortlist of C candidates still holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.nn.dense import dense
from eagle4.retrieval.factors import Factors
from eagle4.retrieval.shortlist import Select, exact, shortlist


class Coverage(NamedTuple):
    """Per state: is the full head's best token among the candidates, what part of its k best is, and what part of its
    probability; and that best token."""

    top1: Bool[Array, " N"]
    top_k: Float[Array, " N"]
    mass: Float[Array, " N"]
    token: Int32[Array, " N"]


def coverage(
    factors: Factors,
    head: Float[Array, "V D"],
    states: Float[Array, "N D"],
    count: int,
    k: int = 8,
    select: Select = exact,
) -> Coverage:
    """Compare `count` candidates with the full head on each state."""
    return covered(shortlist(factors, states, count, select), head, states, k)


def covered(
    ids: Int32[Array, "N C"], head: Float[Array, "V D"], states: Float[Array, "N D"], k: int = 8
) -> Coverage:
    """What the candidates `ids` hold of the full head's distribution; a fixed list of tokens may stand for all rows."""
    logits = lax.optimization_barrier(dense(states, head).astype(jnp.float32))
    # XLA:CPU sorts the whole vocabulary when it sees top_k's result sliced: twenty times as long.
    best = lax.optimization_barrier(lax.top_k(logits, k)[1])
    among = jnp.any(best[:, :, None] == ids[:, None, :], axis=-1)
    whole = jax.nn.logsumexp(logits, axis=-1)
    part = jax.nn.logsumexp(jnp.take_along_axis(logits, ids, axis=-1), axis=-1)
    return Coverage(among[:, 0], among.mean(-1), jnp.exp(part - whole), best[:, 0].astype(jnp.int32))
