"""Arithmetic on the support of a sparse proposal: C candidates instead of a whole vocabulary."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from eagle4.errors import BadInput
from eagle4.types import Proposal


class Support(NamedTuple):
    """A target distribution seen from a proposal: `p` on the C proposed ids, and its mass everywhere else.

    `ids` is V in slots of probability zero: as an index it is dropped on writing and equals no token.
    """

    ids: Int32[Array, "*rows C"]
    q: Float[Array, "*rows C"]
    p: Float[Array, "*rows C"]
    elsewhere: Float[Array, "*rows"]


def on_support(
    p: Float[Array, "*rows V"], ids: Int32[Array, "*rows C"], probs: Float[Array, "*rows C"]
) -> Support:
    """Restrict p to the ids whose proposal probability is positive."""
    active = probs > 0
    safe = jnp.where(active, ids, p.shape[-1])
    inside = jnp.where(active, jnp.take_along_axis(p, jnp.where(active, ids, 0), axis=-1), 0.0)
    # Summing what is left is exact where it is zero; 1 − Σ inside would leave rounding error in its place.
    elsewhere = write(p, safe, jnp.zeros_like(inside)).sum(-1)
    return Support(safe, jnp.where(active, probs, 0.0), inside, elsewhere)


def write(
    p: Float[Array, "*rows V"], ids: Int32[Array, "*rows C"], values: Float[Array, "*rows C"]
) -> Float[Array, "*rows V"]:
    """p with `values` at `ids`; ids outside 0..V−1 are dropped."""
    return jnp.put_along_axis(p, ids, values, axis=-1, inplace=False, mode="drop")


def ratio(above: Array, below: Array) -> Array:
    """above / below, and 0 where below is 0."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1.0), 0.0)


def require_q(q: Proposal | None, verifier: str) -> Proposal:
    """The proposal that a verifier needs.

    Raises:
        BadInput: the drafter made deterministic picks, which have no proposal.
    """
    if q is None:
        raise BadInput(
            f"verifier {verifier!r} needs children drawn from q, this drafter picks them: use 'point_mass'"
        )
    return q


def check_proposal(q: Proposal, vocab_size: int) -> None:
    """Refuse a proposal that no verifier can be exact for. On the host: for records, notebooks and tests.

    Raises:
        BadInput: NaN or negative probabilities, rows that do not sum to 1 within 1e-4, an id outside the
            vocabulary or twice in a row with positive probability, more candidates than tokens.
    """
    ids, probs = np.asarray(q.ids), np.asarray(q.probs, np.float64)
    if ids.shape != probs.shape:
        raise BadInput(
            f"proposal ids have shape {ids.shape} but probs {probs.shape}; give one id per probability"
        )
    if ids.shape[-1] > vocab_size:
        raise BadInput(
            f"proposal has {ids.shape[-1]} candidates for {vocab_size} tokens; use at most {vocab_size}"
        )
    if np.isnan(probs).any():
        raise BadInput("proposal probabilities contain NaN; check the drafter's logits for empty rows")
    if (probs < 0).any():
        raise BadInput(f"proposal probabilities go down to {probs.min():.3g}; pass probabilities, not logits")
    off = np.abs(probs.sum(-1) - 1).max(initial=0.0)
    if off > 1e-4:
        raise BadInput(f"proposal rows sum to 1 only within {off:.3g}; renormalise over the candidates")
    active = probs > 0
    if (active & ((ids < 0) | (ids >= vocab_size))).any():
        raise BadInput(f"proposal ids leave 0..{vocab_size - 1}; map draft ids to target ids first")
    # Inert slots get distinct ids beyond the vocabulary, so that only real repetitions remain.
    marked = np.sort(np.where(active, ids, vocab_size + np.arange(ids.shape[-1])), axis=-1)
    if (np.diff(marked, axis=-1) == 0).any():
        raise BadInput("proposal lists an id twice in one row; add up the probabilities of equal ids")
