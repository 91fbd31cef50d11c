"""Children that are deterministic picks: the proposal is a point mass on each."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.types import Draft, Verdict
from eagle4.verify.walk import NodeLaw, verify_by


def verify(
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"],
    max_depth: int,
    max_children: int,
) -> Verdict:
    """Accept child x with probability p(x). Draft.q is ignored.

    Made for deterministic picks, such as top-k (EAGLE, arXiv 2401.15077) or copied text (prompt lookup). It is
    exact for any children: given them, the emitted token follows p. For drawn ones `rejection` accepts more.
    """
    return verify_by(law, p, draft, uniforms, max_depth, max_children)


def law(
    p: Float[Array, "B V"],
    tokens: Int32[Array, "B K"],
    valid: Bool[Array, "B K"],
    ids: Int32[Array, "B C"] | None = None,
    probs: Float[Array, "B C"] | None = None,
) -> NodeLaw:
    """take_k = p(x_k), residual = p without the children.

    Trying the children in turn with min(1, p/1) and, after a refusal, zeroing that token and renormalising p
    gives the same law: the product of the refusals cancels the normalisers. A repeated sibling is never
    taken.
    """
    inert = jnp.where(valid, tokens, p.shape[-1])
    earlier = jnp.tril(jnp.ones((tokens.shape[-1],) * 2, bool), -1)
    repeated = jnp.any((inert[:, :, None] == inert[:, None, :]) & earlier, axis=-1)
    chance = jnp.take_along_axis(p, jnp.where(valid, tokens, 0), axis=-1)
    return NodeLaw(
        take=jnp.where(valid & ~repeated, chance, 0.0),
        residual=jnp.put_along_axis(p, inert, 0.0, axis=-1, inplace=False, mode="drop"),
    )
