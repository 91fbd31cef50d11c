"""Rejection sampling of children drawn from q without replacement; with one child, the classic p/q rule."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.types import Draft, Verdict
from eagle4.verify.support import on_support, ratio, require_q, write
from eagle4.verify.walk import NodeLaw, verify_by


def verify(
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"],
    max_depth: int,
    max_children: int,
) -> Verdict:
    """Recursive rejection sampling (RSD, arXiv 2402.14160, §3).

    Exact if each node's children were drawn from its q one after another, without replacement, and the
    children kept are a prefix of that order. With one child per node it is speculative sampling (Leviathan et
    al., arXiv 2211.17192, algorithm 1).
    """
    require_q(draft.q, "rejection")
    return verify_by(law, p, draft, uniforms, max_depth, max_children)


def law(
    p: Float[Array, "B V"],
    tokens: Int32[Array, "B K"],
    valid: Bool[Array, "B K"],
    ids: Int32[Array, "B C"],
    probs: Float[Array, "B C"],
) -> NodeLaw:
    """Each child against what is left of p, under what is left of q once its elder siblings are gone."""
    return recursive(p, tokens, valid, ids, probs, replace=False)


def recursive(
    p: Float[Array, "B V"],
    tokens: Int32[Array, "B K"],
    valid: Bool[Array, "B K"],
    ids: Int32[Array, "B C"],
    probs: Float[Array, "B C"],
    replace: bool,
) -> NodeLaw:
    """Children in turn: accept y with min(1, r(y) / (m·q(y))), m = Σr, else r ← max(r − m·q, 0).

    r starts as p and is left unnormalised; q is normalised over the tokens still in it, and without
    replacement y then leaves it. A child that q gives no mass cannot have been drawn from it and is passed
    over.
    """
    support = on_support(p, ids, probs)

    def step(carry, child):
        r, q, reach = carry
        token, is_child = child
        drawn = (support.ids == token[:, None]) & (q > 0) & is_child[:, None]
        tried = drawn.any(-1)
        mass = r.sum(-1) + support.elsewhere
        expected = mass[:, None] * ratio(q, q.sum(-1, keepdims=True))
        accept = jnp.minimum(ratio(*(jnp.sum(jnp.where(drawn, x, 0.0), axis=-1) for x in (r, expected))), 1.0)
        r = jnp.where(tried[:, None], jnp.maximum(r - expected, 0.0), r)
        return (r, q if replace else jnp.where(drawn, 0.0, q), reach * (1.0 - accept)), reach * accept

    start = (support.p, support.q, jnp.ones_like(support.elsewhere))
    (r, _, _), take = lax.scan(step, start, (tokens.T, valid.T))
    return NodeLaw(take.T, write(p, support.ids, r))
