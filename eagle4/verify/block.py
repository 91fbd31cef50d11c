"""Block verification: one joint decision about a whole chain."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.tree.topology import children
from eagle4.types import Draft, Proposal, Verdict
from eagle4.verify.support import on_support, ratio, require_q, write
from eagle4.verify.walk import at_node, at_nodes, cell, draw_residual


class ChainLaw(NamedTuple):
    """`stop[b, i]` is the probability that exactly i tokens are accepted; `residual[b, i]` the unnormalised
    distribution of the token emitted after them."""

    stop: Float[Array, "B P1"]
    residual: Float[Array, "B P1 V"]


class Chain(NamedTuple):
    """A draft along first children from the root: node ids, −1 beyond the end, and what the law needs there.

    `more` says which nodes have a child in the chain; the proposal of a node is that child's.
    """

    nodes: Int32[Array, "B P1"]
    more: Bool[Array, "B P1"]
    tokens: Int32[Array, "B P1"]
    p: Float[Array, "B P1 V"]
    q: Proposal


def verify(
    p: Float[Array, "B N V"],
    draft: Draft,
    uniforms: Float[Array, "B P1 2"],
    max_depth: int,
    max_children: int,
) -> Verdict:
    """Block verification (Sun et al., arXiv 2403.10444, algorithm 2).

    Exact if each node's child was drawn from its q. Only first children are looked at, so a tree counts as
    its first chain. The number accepted is drawn with the single uniform `uniforms[:, 0, 0]`: the decision
    depends on the whole chain, and must not look at uniforms of later positions, which the next round uses
    again when this one stops early.
    """
    chain = first_chain(p, draft, max_depth)
    weight, stop = _stops(chain)
    # Longest first, so that what rounding leaves over goes to the root, not beyond the end of the chain.
    num_accepted = jnp.maximum(max_depth - cell(stop[:, ::-1], uniforms[:, 0, 0]), 0)
    last = jax.tree.map(lambda values: at_node(values, num_accepted), chain)
    path = jnp.where(jnp.arange(max_depth) < num_accepted[:, None], chain.nodes[:, 1:], -1)
    residual = _residual(last, at_node(weight, num_accepted))
    next_token = draw_residual(residual, last.p, at_node(uniforms[..., 1], num_accepted))
    return Verdict(path, num_accepted, next_token)


def chain_law(p: Float[Array, "B N V"], draft: Draft, max_depth: int) -> ChainLaw:
    """The law that `verify` applies, for every stopping place at once."""
    chain = first_chain(p, draft, max_depth)
    weight, stop = _stops(chain)
    return ChainLaw(stop, _residual(chain, weight))


def first_chain(p: Float[Array, "B N V"], draft: Draft, max_depth: int) -> Chain:
    """Follow first children from the root for at most `max_depth` levels."""
    first = children(draft.parent, draft.candidate, 1)[..., 0]
    steps = [jnp.zeros(first.shape[0], jnp.int32)]
    for _ in range(max_depth):
        steps.append(jnp.where(steps[-1] >= 0, at_node(first, jnp.maximum(steps[-1], 0)), -1))
    nodes = jnp.stack(steps, axis=1)
    q = require_q(draft.q, "block")

    def pick(values):
        return jnp.take_along_axis(values, jnp.maximum(nodes, 0)[..., None], axis=1)

    more = jnp.pad(nodes[:, 1:] >= 0, ((0, 0), (0, 1)))
    return Chain(nodes, more, at_nodes(draft.tokens, nodes), pick(p), Proposal(pick(q.ids), pick(q.probs)))


def _stops(chain: Chain) -> tuple[Float[Array, "B P1"], Float[Array, "B P1"]]:
    """P(at least i accepted | first i drafts), the paper's p_i; and P(exactly i accepted | all drafts).

    The paper accepts up to i with probability h_i, independently for each i, and keeps the longest.
    """
    support = on_support(chain.p, chain.q.ids, chain.q.probs)
    child = support.ids[:, :-1] == chain.tokens[:, 1:, None]
    ratios = jnp.sum(jnp.where(child, ratio(support.p, support.q)[:, :-1], 0.0), axis=-1)
    weights = [jnp.ones_like(support.elsewhere[:, 0])]
    for i in range(ratios.shape[1]):
        weights.append(jnp.minimum(weights[-1] * ratios[:, i], 1.0))
    weight = jnp.stack(weights, axis=1)
    inside = jnp.maximum(weight[..., None] * support.p - support.q, 0.0).sum(-1)
    excess = weight * support.elsewhere + inside
    longer = jnp.where(chain.more, ratio(excess, excess + 1.0 - weight), weight)
    longer = jnp.where(chain.nodes >= 0, longer, 0.0).at[:, 0].set(1.0)
    none_later = jnp.cumprod(1.0 - longer[:, :0:-1], axis=-1)[:, ::-1]
    return weight, longer * jnp.pad(none_later, ((0, 0), (0, 1)), constant_values=1.0)


def _residual(chain: Chain, weight: Float[Array, "*rows"]) -> Float[Array, "*rows V"]:
    """max(p_i·p − q, 0) where the chain goes on, p where it ends."""
    weight = jnp.where(chain.more, weight, 1.0)[..., None]
    support = on_support(chain.p, chain.q.ids, jnp.where(chain.more[..., None], chain.q.probs, 0.0))
    return write(weight * chain.p, support.ids, jnp.maximum(weight * support.p - support.q, 0.0))
