"""Draft trees whose children are drawn from q without replacement (RSD, arXiv 2402.14160 §3)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from eagle4.errors import BadInput
from eagle4.specs import TreeSpec
from eagle4.tree.grow import (
    Candidates,
    Extend,
    Frontier,
    Select,
    Step,
    assemble,
    choose,
    creation_order,
    grow,
    planned,
)
from eagle4.types import Draft, Plan, Proposal


def sample_children(
    uniforms: Float[Array, "B W C"], q_ids: Int32[Array, "B W C"], q_probs: Float[Array, "B W C"], count: int
) -> tuple[Int32[Array, "B W K"], Float[Array, "B W K"], Int32[Array, "B W K"]]:
    """Draw `count` children without replacement: ids, log q and candidate slots, in the order of the draws.

    Gumbel top-k (arXiv 1903.06059 §2.3): the largest log q + Gumbel noise first, which is the same as
    drawing one after the other from what is left of q. Slots of zero probability are never drawn; where
    they run out, id and slot are −1 and log q is −inf.
    """
    if count > q_ids.shape[-1]:
        raise BadInput(
            f"tree.children is {count} but the drafter has only {q_ids.shape[-1]} candidates; lower it"
        )
    probs = q_probs.astype(jnp.float32)
    log_q = jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), -jnp.inf)
    # The open interval keeps the noise finite: 0 would hide a candidate, 1 would make it win always.
    inner = jnp.clip(uniforms.astype(jnp.float32), np.finfo(np.float32).tiny, 1 - 2.0**-24)
    noisy, slots = lax.top_k(log_q - jnp.log(-jnp.log(inner)), count)
    drawn = noisy > -jnp.inf
    ids = jnp.where(drawn, jnp.take_along_axis(q_ids, slots, axis=-1), -1)
    return (
        ids,
        jnp.where(drawn, jnp.take_along_axis(log_q, slots, axis=-1), -jnp.inf),
        jnp.where(drawn, slots, -1),
    )


def sampled_draft(
    step: Step,
    carry: Any,
    root_token: Int32[Array, " B"],
    root_q: Candidates,
    uniforms: Callable[[Array], Array],
    envelope: TreeSpec,
    plan: Plan,
    extend: Extend = planned,
) -> tuple[Draft, Any]:
    """A tree of draws; `q` of the draft is what each node's children were drawn from.

    `root_q` are ids and probabilities [B, C]; `step` returns the same [B, W, C]; `uniforms(depth)` gives
    [B, W, C] numbers in [0, 1) for the children of nodes at `depth` (row 0 for the root's). Exactness needs
    a shape that no draw decides: each level expands the first plan.width draws (all first draws, then all
    second ones, …), plan.depth and plan.nodes are fixed before, and a budget cuts the creation order, hence
    the end of each draw order. Nodes that were not expanded have a point mass on id 0 for q and no
    children.
    """
    count, first = envelope.children, uniforms(jnp.int32(0))[:, :1]
    ids, logps, _ = sample_children(first, root_q[0][:, None], root_q[1][:, None], count)

    def draw(state: tuple[_Expanded, Any], frontier: Frontier) -> tuple[Array, Array, tuple[_Expanded, Any]]:
        seen, carry = state
        q_ids, q_probs, carry = step(carry, frontier)
        ids, logps, _ = sample_children(uniforms(frontier.depth), q_ids, q_probs, count)
        return ids, logps, (_remember(seen, q_ids, q_probs, frontier), carry)

    pool, (seen, carry) = grow(
        draw,
        (_only_root(root_q, envelope), carry),
        (ids[:, 0], logps[:, 0]),
        envelope,
        plan,
        extend,
        _first_draws(envelope),
    )
    slots = choose(creation_order(pool.score), plan.nodes, envelope.nodes)
    return replace(assemble(pool, slots, root_token), q=_proposals(seen, slots)), carry


class _Expanded(NamedTuple):
    """What each expanded node's children were drawn from, and the pool index of that node."""

    ids: Int32[Array, "B E C"]
    probs: Float[Array, "B E C"]
    index: Int32[Array, "B E"]


# A pool index that is neither a node (0 and up) nor the root (−1).
_NOBODY = -2


def _only_root(root_q: Candidates, envelope: TreeSpec) -> _Expanded:
    batch, size = root_q[0].shape
    rows = 1 + max(envelope.depth - 1, 0) * envelope.width
    return _Expanded(
        ids=jnp.zeros((batch, rows, size), jnp.int32).at[:, 0].set(root_q[0]),
        probs=jnp.zeros((batch, rows, size), jnp.float32).at[:, 0].set(root_q[1]),
        index=jnp.full((batch, rows), _NOBODY, jnp.int32).at[:, 0].set(-1),
    )


def _remember(seen: _Expanded, q_ids: Array, q_probs: Array, frontier: Frontier) -> _Expanded:
    index = jnp.where(frontier.valid, frontier.index, _NOBODY)
    row = 1 + (frontier.depth - 1) * index.shape[1]
    new = (q_ids.astype(jnp.int32), q_probs.astype(jnp.float32), index)
    return _Expanded(*(lax.dynamic_update_slice_in_dim(a, b, row, axis=1) for a, b in zip(seen, new)))


def _first_draws(envelope: TreeSpec) -> Select:
    """Every frontier row's first draw, then every second one, …; the scores only say what exists."""
    row, rank = np.divmod(np.arange(envelope.width * envelope.children), envelope.children)
    order = (rank * envelope.width + row).astype(np.float32)

    def select(scores: Array, depth: Array) -> Array:
        del depth
        return lax.top_k(jnp.where(scores > -jnp.inf, -order, -jnp.inf), envelope.width)[1]

    return select


def _proposals(seen: _Expanded, slots: Int32[Array, "B N1"]) -> Proposal:
    """Each node's row of `seen`; a point mass on id 0 for nodes that were not expanded."""
    node = jnp.pad(slots, ((0, 0), (1, 0)), constant_values=-1)
    same = node[:, :, None] == seen.index[:, None, :]
    row, found = same.argmax(axis=2)[:, :, None], same.any(axis=2)[:, :, None]
    nothing = jnp.zeros(seen.probs.shape[2]).at[0].set(1.0)
    return Proposal(
        ids=jnp.where(found, jnp.take_along_axis(seen.ids, row, axis=1), 0),
        probs=jnp.where(found, jnp.take_along_axis(seen.probs, row, axis=1), nothing),
    )
