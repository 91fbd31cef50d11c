"""Losses between the target's next-token distribution p and the drafter's q, and the set they are compared on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32


class Candidates(NamedTuple):
    """Distinct token ids, and for each the log of how many tokens of the vocabulary it stands for."""

    ids: Int32[Array, " C"]
    log_weight: Float[Array, " C"]


def shared_candidates(
    tokens: Int32[Array, "B T"], frequent: Bool[Array, " V"], size: int, key: jax.Array
) -> Candidates:
    """A batch's own tokens and the frequent ones, then a uniform sample of the rest up to `size`.

    A sampled token stands for (V − M) / (C − M) tokens, M being the number of certain ones, so that a sum over the
    set estimates the sum over the vocabulary (sampled softmax, Jean et al., arXiv 1412.2007 §3). Should the certain
    ones alone exceed `size`, which of them stay is random.
    """
    V = frequent.shape[0]
    certain = frequent.at[tokens.reshape(-1)].set(True)
    luck = jax.random.uniform(key, (V,))
    _, ids = lax.top_k(certain + luck, size)
    M = jnp.sum(certain)
    each = jnp.log((V - M) / jnp.maximum(size - M, 1))
    return Candidates(ids.astype(jnp.int32), jnp.where(certain[ids], 0.0, jnp.maximum(each, 0.0)))


def whole(vocab_size: int) -> Candidates:
    """Every token, each for itself."""
    return Candidates(jnp.arange(vocab_size, dtype=jnp.int32), jnp.zeros(vocab_size))


def soft_ce(teacher: Float[Array, "*T C"], student: Float[Array, "*T C"]) -> Float[Array, "*T"]:
    """−Σ p log q from logits."""
    return -jnp.sum(jax.nn.softmax(teacher) * jax.nn.log_softmax(student), axis=-1)


def kl(teacher: Float[Array, "*T C"], student: Float[Array, "*T C"]) -> Float[Array, "*T"]:
    """KL(p‖q) from logits: soft_ce less p's entropy, so the gradient is the same and 0 is the best value."""
    log_p = jax.nn.log_softmax(teacher)
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(student)), axis=-1)


def acceptance(teacher: Float[Array, "*T C"], student: Float[Array, "*T C"]) -> Float[Array, "*T"]:
    """−log Σ min(p, q): the sum is the chance that one drawn token is accepted (arXiv 2211.17192, theorem 3.5)."""
    overlap = jnp.minimum(jax.nn.softmax(teacher), jax.nn.softmax(student)).sum(-1)
    return -jnp.log(jnp.maximum(overlap, 1e-9))


TOKEN_LOSSES = {"soft_ce": soft_ce, "kl": kl, "acceptance": acceptance}


def smooth_l1(predicted: Float[Array, "*T D"], target: Float[Array, "*T D"]) -> Float[Array, "*T"]:
    """Mean over D of d²/2 where |d| < 1, else |d| − 1/2 (EAGLE-1's regression loss)."""
    d = jnp.abs(predicted - target)
    return jnp.mean(jnp.where(d < 1, 0.5 * d * d, d - 0.5), axis=-1)


def normalised(losses: Float[Array, "B T"], mask: Bool[Array, "B T"], normaliser: str) -> Float[Array, ""]:
    """The masked sum over: supervised tokens (valid), all rows (rows), or each sequence's own, then the mean."""
    kept = jnp.where(mask, losses, 0.0)
    if normaliser == "rows":
        return kept.sum() / mask.size
    if normaliser == "valid":
        return kept.sum() / jnp.maximum(mask.sum(), 1)
    each = kept.sum(1) / jnp.maximum(mask.sum(1), 1)
    return each.sum() / jnp.maximum(mask.any(1).sum(), 1)
