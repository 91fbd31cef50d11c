"""Children drawn independently from q, so that siblings may repeat."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.types import Draft, Verdict
from eagle4.verify.rejection import recursive
from eagle4.verify.support import on_support, ratio, require_q, write
from eagle4.verify.walk import NodeLaw, verify_by

# The bracket for the threshold starts K − 1 wide; after 40 halvings it is below float32 resolution.
_HALVINGS = 40


def verify_multi_round(
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"],
    max_depth: int,
    max_children: int,
) -> Verdict:
    """Multi-round rejection (SpecInfer, arXiv 2305.09781, algorithm 2): q stays the same after a refusal."""
    require_q(draft.q, "multi_round")
    return verify_by(multi_round, p, draft, uniforms, max_depth, max_children)


def verify_k_sequential(
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"],
    max_depth: int,
    max_children: int,
) -> Verdict:
    """K-sequential selection (SpecTr, arXiv 2310.15141, algorithm 2): every child faces the same test."""
    require_q(draft.q, "k_sequential")
    return verify_by(k_sequential, p, draft, uniforms, max_depth, max_children)


def multi_round(
    p: Float[Array, "B V"],
    tokens: Int32[Array, "B K"],
    valid: Bool[Array, "B K"],
    ids: Int32[Array, "B C"],
    probs: Float[Array, "B C"],
) -> NodeLaw:
    """The node law of `verify_multi_round`."""
    return recursive(p, tokens, valid, ids, probs, replace=True)


def k_sequential(
    p: Float[Array, "B V"],
    tokens: Int32[Array, "B K"],
    valid: Bool[Array, "B K"],
    ids: Int32[Array, "B C"],
    probs: Float[Array, "B C"],
) -> NodeLaw:
    """Accept y with min(1, p(y) / (γ·q(y))) in turn; the residual is p − c(γ)·min(q, p/γ).

    With β = Σ min(q, p/γ) the chance that one draw is accepted and m children, c(γ) = Σ_{i<m} (1 − β)^i. The
    residual is not negative if and only if c(γ) ≤ γ; the smallest such γ accepts most (arXiv 2310.15141,
    theorem 2).
    """
    support = on_support(p, ids, probs)
    drawn = support.ids[:, None, :] == jnp.where(valid, tokens, -1)[:, :, None]
    tried = drawn.any(-1)
    gamma, tries = _threshold(support.q, support.p, tried)
    kept = jnp.minimum(support.q, support.p / gamma[:, None])
    ratios = ratio(kept, support.q)
    accept = jnp.sum(jnp.where(drawn, ratios[:, None, :], 0.0), axis=-1)
    refuse = jnp.cumprod(1.0 - accept, axis=-1)
    reach = jnp.concatenate([jnp.ones_like(refuse[:, :1]), refuse[:, :-1]], axis=-1)
    residual = jnp.maximum(support.p - tries[:, None] * kept, 0.0)
    return NodeLaw(reach * accept, write(p, support.ids, residual))


def _threshold(
    q: Float[Array, "B C"], p: Float[Array, "B C"], tried: Bool[Array, "B K"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The smallest γ in [1, K] with c(γ) ≤ γ, by bisection that always keeps a valid end; and c(γ)."""
    powers = jnp.arange(tried.shape[-1])
    count = tried.sum(-1, keepdims=True)

    def tries(gamma):
        refuse = 1.0 - jnp.minimum(q, p / gamma[:, None]).sum(-1, keepdims=True)
        return jnp.sum(jnp.where(powers < count, jnp.maximum(refuse, 0.0) ** powers, 0.0), axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        valid = tries(middle) <= middle
        return jnp.where(valid, low, middle), jnp.where(valid, middle, high)

    low = jnp.ones_like(q[:, 0])
    _, gamma = lax.fori_loop(0, _HALVINGS, halve, (low, jnp.maximum(count[:, 0], 1).astype(q.dtype)))
    return gamma, tries(gamma)
