"""Going down a draft tree: the part that all node-by-node verifiers share.

A verifier is a law of one node: with which probability each child is the accepted one, and from what the
token is drawn when none is. The law is exposed, so that a test can enumerate it; the walk only spends one
uniform per level on it. At a node with two children the uniform u falls into one of three cells:

    0 ────────── take[0] ────────── take[0] + take[1] ────────── 1
       child 0 accepted   child 1 accepted        draw from the residual
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.sampling import draw
from eagle4.tree.topology import children
from eagle4.types import Draft, Proposal, Verdict

# Below this mass a residual is rounding error: reaching it has about that probability.
_TINY = 1e-12


class NodeLaw(NamedTuple):
    """What happens at one node: `take[b, k]` is the probability that child k is the accepted one.

    `residual` is the unnormalised distribution of the token emitted when no child is accepted. At a node
    without children it is the target's own distribution.
    """

    take: Float[Array, "B K"]
    residual: Float[Array, "B V"]


# (p [B, V], child tokens [B, K], child valid [B, K], q ids [B, C] or None, q probs [B, C] or None) -> NodeLaw
Law = Callable[..., NodeLaw]

# (level [], node [B], child tokens [B, K], child valid [B, K]) -> index of the accepted child [B], K for none
Choose = Callable[..., Int32[Array, " B"]]


class Descent(NamedTuple):
    """The accepted path and its length as in `Verdict`; its last node, and that node's children, −1 padded.

    After a path of full length the children are all −1: they were never tried.
    """

    path: Int32[Array, "B P"]
    num_accepted: Int32[Array, " B"]
    node: Int32[Array, " B"]
    kids: Int32[Array, "B K"]


def verify_by(
    law: Law,
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"],
    max_depth: int,
    max_children: int,
) -> Verdict:
    """Walk the tree under a node law.

    Level i spends `uniforms[:, i, 0]` on the children of the node at depth i, and `uniforms[:, i, 1]` on the
    target's own token if the path ends there.
    """

    def law_at(node, tokens, valid):
        return law(at_node(p, node), tokens, valid, *proposal_at(draft.q, node))

    def choose(level, node, tokens, valid):
        return cell(law_at(node, tokens, valid).take, uniforms[:, level, 0])

    path, num_accepted, node, kids = descend(draft, max_depth, max_children, choose)
    residual = law_at(node, at_nodes(draft.tokens, kids), kids >= 0).residual
    u = at_node(uniforms[..., 1], num_accepted)
    return Verdict(path, num_accepted, draw_residual(residual, at_node(p, node), u))


def descend(draft: Draft, max_depth: int, max_children: int, choose: Choose) -> Descent:
    """Follow the children that `choose` picks, from the root, for at most `max_depth` levels."""
    kids = children(draft.parent, draft.candidate, max_children)
    batch, slots = draft.tokens.shape[0], jnp.arange(max_children)

    def step(carry, level):
        node, alive = carry
        kid = jnp.where(alive[:, None], at_node(kids, node), -1)
        picked = choose(level, node, at_nodes(draft.tokens, kid), kid >= 0)
        child = jnp.max(jnp.where(slots == picked[:, None], kid, -1), axis=-1, initial=-1)
        return (jnp.where(child >= 0, child, node), child >= 0), child

    start = (jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool))
    (node, _), path = lax.scan(step, start, jnp.arange(max_depth))
    num_accepted = jnp.sum(path >= 0, axis=0, dtype=jnp.int32)
    untried = jnp.where((num_accepted < max_depth)[:, None], at_node(kids, node), -1)
    return Descent(path.T, num_accepted, node, untried)


def cell(take: Float[Array, "B K"], u: Float[Array, " B"]) -> Int32[Array, " B"]:
    """The first child k with take[k] > 0 and u < take[0] + … + take[k]; K when u lies beyond all."""
    return first_true((take > 0) & (u[:, None] < jnp.cumsum(take, axis=-1)))


def first_true(hit: Bool[Array, "B K"]) -> Int32[Array, " B"]:
    """Index of the first True in each row, K when there is none."""
    size = hit.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    return jnp.min(jnp.where(hit, index, size), axis=-1, initial=size)


def draw_residual(
    residual: Float[Array, "B V"], p: Float[Array, "B V"], u: Float[Array, " B"]
) -> Int32[Array, " B"]:
    """Draw from the residual, or from p where the residual has no mass left."""
    some = residual.sum(-1, keepdims=True) > _TINY
    return draw(jnp.where(some, residual, p), u)


def at_node(values: Array, node: Int32[Array, " B"]) -> Array:
    """values[b, node[b]] for values [B, N, …]."""
    return values[jnp.arange(node.shape[0]), node]


def at_nodes(values: Array, nodes: Int32[Array, "B K"]) -> Array:
    """values[b, nodes[b, k]] for values [B, N]; entries of absent nodes (−1) mean nothing."""
    return jnp.take_along_axis(values, jnp.maximum(nodes, 0), axis=1)


def proposal_at(q: Proposal | None, node: Int32[Array, " B"]) -> tuple[Array | None, Array | None]:
    """The proposal that a node's children were drawn from: ids [B, C] and probs [B, C], or None twice."""
    return (None, None) if q is None else (at_node(q.ids, node), at_node(q.probs, node))
