"""Draft trees of a fixed shape (EAGLE, arXiv 2401.15077)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from eagle4.specs import TreeSpec
from eagle4.tree.grow import AS_PLANNED, Candidates, Decide, Step, grow, rerank
from eagle4.tree.presets import Static
from eagle4.types import Draft, Plan


def static_draft(
    step: Step,
    carry: Any,
    root_token: Int32[Array, " B"],
    root_children: Candidates,
    shape: Static,
    plan: Plan,
    decide: Decide = AS_PLANNED,
) -> tuple[Draft, Any]:
    """A tree of fixed shape (EAGLE, arXiv 2401.15077): the node of rank r takes its parent's r-th best child.

    The frontier is the shape's `expanded` nodes, in an envelope of `shape.width` rows and
    `shape.max_children` children; plan.width and plan.children are not read. With fewer plan.nodes than the
    shape has, the best stay.
    """
    envelope = TreeSpec("static", shape.max_depth, shape.width, shape.max_children, len(shape.parent))
    table, inside = _shape_tables(shape)
    plan = plan._replace(width=jnp.int32(envelope.width), children=jnp.int32(envelope.children))

    def select(scores: Array, depth: Array) -> Array:
        return jnp.broadcast_to(jnp.asarray(table)[depth], (scores.shape[0], envelope.width))

    pool, carry = grow(step, carry, root_children, envelope, plan, decide.extend, select)
    pool = pool._replace(score=jnp.where(jnp.asarray(inside), pool.score, -jnp.inf))
    return rerank(pool, root_token, decide.budget(plan, pool.score, pool.depth), envelope), carry


def _shape_tables(shape: Static) -> tuple[np.ndarray, np.ndarray]:
    """For each depth the level slots to expand (−1 padded), and which pool slots belong to the shape."""
    width, count = shape.width, shape.max_children
    table = np.full((shape.max_depth + 1, width), -1, np.int32)
    inside = np.zeros(count * (1 + max(shape.max_depth - 1, 0) * width), bool)
    for node, (parent, rank, depth) in enumerate(zip(shape.parent, shape.rank, shape.depth)):
        if node == 0:
            continue
        slot = shape.expanded[depth - 1].index(parent) * count + rank
        inside[slot if depth == 1 else count + (depth - 2) * width * count + slot] = True
        if depth < shape.max_depth and node in shape.expanded[depth]:
            table[depth, shape.expanded[depth].index(node)] = slot
    return table, inside
