"""What a parent list implies: depth, who sees whom, positions, children, paths.

A tree is `parent [B, N]`: node 0 is the root, parents come before their children, −1 marks the root and
unused nodes. Everything is batched over B and has static shapes.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from eagle4.errors import BadInput


def used(parent: Int32[Array, "B N"]) -> Bool[Array, "B N"]:
    """Which slots hold a node: the root and every slot with a parent."""
    return (parent >= 0) | (jnp.arange(parent.shape[1]) == 0)


def ancestors(parent: Int32[Array, "B N"]) -> Bool[Array, "B N N"]:
    """Attention mask of a tree: row n sees its ancestors and itself; unused nodes see only themselves.

        tree            n  sees
            0           0  x....
           / \\          1  xx...
          1   2         2  x.x..
         / \\            3  xx.x.
        3   4           4  xx..x

    A chain gives the causal mask. Tree attention: SpecInfer, arXiv 2305.09781 §4.1.
    """
    size = parent.shape[1]
    seen = jnp.broadcast_to(jnp.eye(size, dtype=bool), (parent.shape[0], size, size))
    jump = parent
    # After step k a row holds its nearest 2^k path nodes and `jump` is the 2^k-th ancestor.
    for _ in range((size - 1).bit_length()):
        there = jump >= 0
        index = jnp.where(there, jump, 0)
        seen = seen | (jnp.take_along_axis(seen, index[:, :, None], axis=1) & there[:, :, None])
        jump = jnp.where(there, jnp.take_along_axis(jump, index, axis=1), -1)
    return seen


def depths(parent: Int32[Array, "B N"]) -> Int32[Array, "B N"]:
    """Edges between each node and the root; 0 for the root and for unused nodes."""
    return ancestors(parent).sum(axis=2, dtype=jnp.int32) - 1


def positions(root_position: Int32[Array, " B"], depth: Int32[Array, "B N"]) -> Int32[Array, "B N"]:
    """Sequence position of each node: siblings share one, because only one of them can be committed."""
    return root_position[:, None] + depth


def ranks(parent: Int32[Array, "B N"], candidate: Bool[Array, "B N"] | None = None) -> Int32[Array, "B N"]:
    """Place of each node among its siblings in draft order (increasing node id), from 0.

    The root and unused nodes get −1. So do nodes that are not a `candidate`; they are not counted either.
    """
    size = parent.shape[1]
    child = parent >= 0 if candidate is None else (parent >= 0) & candidate
    earlier = jnp.tril(jnp.ones((size, size), bool), k=-1)
    sibling = (parent[:, :, None] == parent[:, None, :]) & child[:, None, :] & earlier
    return jnp.where(child, sibling.sum(axis=2, dtype=jnp.int32), -1)


def children(
    parent: Int32[Array, "B N"], candidate: Bool[Array, "B N"], num_children: int
) -> Int32[Array, "B N K"]:
    """Child ids of every node in draft order, −1 padded; nodes that are not candidates are left out.

    `num_children` must be at least the largest number of children in the tree: later ones are not listed.
    """
    batch, size = parent.shape
    rank = ranks(parent, candidate)
    row = jnp.where(rank >= 0, parent, size)
    ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    table = jnp.full((batch, size, num_children), -1, jnp.int32)
    return table.at[jnp.arange(batch)[:, None], row, jnp.maximum(rank, 0)].set(ids, mode="drop")


def leaves(parent: Int32[Array, "B N"]) -> Bool[Array, "B N"]:
    """Nodes without children; a lone root is a leaf, unused slots are not."""
    ids = jnp.arange(parent.shape[1])
    is_parent = (parent[:, :, None] == ids).any(axis=1)
    return used(parent) & ~is_parent


def paths(parent: Int32[Array, "B N"], max_depth: int) -> Int32[Array, "B N P1"]:
    """Path from the root to each node: entry d is its ancestor at depth d, −1 beyond the node itself.

    Unused nodes and nodes deeper than `max_depth` get −1 everywhere. Never index with −1:
    JAX wraps it to the last node.
    """
    batch, size = parent.shape
    depth = depths(parent)

    def climb(node: Array, _: None) -> tuple[Array, Array]:
        above = jnp.take_along_axis(parent, jnp.maximum(node, 0), axis=1)
        return jnp.where(node >= 0, above, -1), node

    start = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    _, upwards = lax.scan(climb, start, None, length=max_depth + 1)
    steps_up = depth[:, :, None] - jnp.arange(max_depth + 1, dtype=jnp.int32)
    known = used(parent)[:, :, None] & (steps_up >= 0) & (depth <= max_depth)[:, :, None]
    index = jnp.where(known, steps_up, 0)
    return jnp.where(known, jnp.take_along_axis(jnp.moveaxis(upwards, 0, 2), index, axis=2), -1)


def check_parents(parents: Sequence[int], max_nodes: int) -> None:
    """Refuse (`BadInput`) a parent list that is no tree in draft order or has more than `max_nodes` nodes."""
    size = len(parents)
    if size == 0 or parents[0] != -1:
        raise BadInput("tree parents must start with -1: node 0 is the root")
    if size > max_nodes:
        raise BadInput(f"tree has {size} nodes but the envelope holds {max_nodes}; raise tree.nodes")
    for node, above in enumerate(parents):
        if node > 0 and above == -1:
            raise BadInput(f"tree node {node} has parent -1; only node 0, the root, has none")
        if not -1 <= above < size:
            raise BadInput(f"tree node {node} has parent {above}, which is out of range 0..{size - 1}")
    for node in range(1, size):
        trail = [node]
        while trail[-1] > 0 and parents[trail[-1]] not in trail:
            trail.append(parents[trail[-1]])
        if trail[-1] > 0:
            raise BadInput(f"tree parents have a cycle through node {parents[trail[-1]]}")
    for node, above in enumerate(parents):
        if above >= node:
            raise BadInput(
                f"tree is not in topological order: node {node} comes before its parent {above}; sort it"
            )
