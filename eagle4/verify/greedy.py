"""Greedy verification: accept exactly what plain greedy decoding would have emitted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.sampling import first_argmax
from eagle4.types import Draft, Verdict
from eagle4.verify.walk import NodeLaw, at_node, descend, first_true


def verify(
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"] | None,
    max_depth: int,
    max_children: int,
) -> Verdict:
    """Follow children that equal the argmax of their parent's scores; then emit the argmax.

    `p` may be logits or any other increasing score. Ties go to the lowest id. The uniforms are ignored.
    """
    best = first_argmax(p)

    def choose(level, node, tokens, valid):
        return first_true(valid & (tokens == at_node(best, node)[:, None]))

    path, num_accepted, node, _ = descend(draft, max_depth, max_children, choose)
    return Verdict(path, num_accepted, at_node(best, node))


def law(
    p: Float[Array, "B V"],
    tokens: Int32[Array, "B K"],
    valid: Bool[Array, "B K"],
    ids: Int32[Array, "B C"] | None = None,
    probs: Float[Array, "B C"] | None = None,
) -> NodeLaw:
    """The node law of `verify`, as one-hot distributions. The proposal is ignored."""
    best = first_argmax(p)
    match = first_true(valid & (tokens == best[:, None]))
    return NodeLaw(
        take=jax.nn.one_hot(match, tokens.shape[-1], dtype=jnp.float32),
        residual=jax.nn.one_hot(best, p.shape[-1], dtype=jnp.float32),
    )
