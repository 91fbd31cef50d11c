"""From a drafter's step to a draft tree, for every kind of `TreeSpec`.

A drafter says which tokens may follow a node, with which probabilities; the kind says which of them become children
and which nodes are expanded and kept. `sampled` draws its children and keeps q; the other kinds take the likeliest
ones, and q is None.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from eagle4.errors import BadInput
from eagle4.specs import TreeSpec
from eagle4.tree.grow import Candidates, Decide, Frontier, grow, rerank
from eagle4.tree.presets import from_rank_paths, spec_of
from eagle4.tree.sampled import sampled_draft
from eagle4.tree.static import static_draft
from eagle4.types import Draft, Plan

# (carry, frontier) -> ids [B, W, C], probabilities [B, W, C], carry
Follow = Callable[[Any, Frontier], tuple[Array, Array, Any]]


def draft_tree(
    tree: TreeSpec,
    follow: Follow,
    carry: Any,
    root: Int32[Array, " B"],
    root_q: Candidates,
    keys: jax.Array,
    plan: Plan,
    decide: Decide,
) -> tuple[Draft, Any]:
    """The tree of `tree.kind` under `root`, and the carry after the last level that was drafted.

    `root_q` are the root's candidates and their probabilities [B, C]; `follow` returns the same [B, W, C] for a
    frontier. C is any number from tree.children to V; ids are distinct, rows sum to 1, and a candidate of
    probability 0 is never a child. `keys` [B], one per row, are spent by drawn children only.
    """
    return KINDS[tree.kind](tree, follow, carry, root, root_q, keys, plan, decide)


def _dynamic(tree, follow, carry, root, root_q, keys, plan, decide):
    del keys
    children = likeliest(root_q, tree.children)
    pool, carry = grow(_picks(follow, tree.children), carry, children, tree, plan, decide.extend)
    return rerank(pool, root, decide.budget(plan, pool.score, pool.depth), tree), carry


def _chain(tree, follow, carry, root, root_q, keys, plan, decide):
    return _dynamic(replace(tree, width=1, children=1), follow, carry, root, root_q, keys, plan, decide)


def _static(tree, follow, carry, root, root_q, keys, plan, decide):
    del keys
    if tree != spec_of(tree.paths, tree.buckets):
        need = spec_of(tree.paths)
        raise BadInput(
            f"tree.paths need depth={need.depth}, width={need.width}, children={need.children}, nodes={need.nodes}, "
            f"not {tree.depth}, {tree.width}, {tree.children}, {tree.nodes}; make the spec with presets.spec_of"
        )
    children = likeliest(root_q, tree.children)
    shape = from_rank_paths(tree.paths)
    return static_draft(_picks(follow, tree.children), carry, root, children, shape, plan, decide)


def _sampled(tree, follow, carry, root, root_q, keys, plan, decide):
    # Decisions look at the scores of drawn tokens, which must not decide the shape: only the plan does.
    del decide
    uniforms = row_uniforms(keys, tree.width, root_q[0].shape[-1])
    return sampled_draft(follow, carry, root, root_q, uniforms, tree, plan)


KINDS = {"chain": _chain, "static": _static, "dynamic": _dynamic, "sampled": _sampled}


def likeliest(
    candidates: tuple[Int32[Array, "*T C"], Float[Array, "*T C"]], count: int
) -> tuple[Int32[Array, "*T K"], Float[Array, "*T K"]]:
    """The `count` likeliest candidates and their log probabilities, best first; −inf where there is none."""
    ids, probs = candidates
    if count > ids.shape[-1]:
        raise BadInput(
            f"tree.children is {count} but the drafter has only {ids.shape[-1]} candidates; lower it"
        )
    top, slots = lax.top_k(probs.astype(jnp.float32), count)
    exists = top > 0
    log = jnp.where(exists, jnp.log(jnp.where(exists, top, 1.0)), -jnp.inf)
    return jnp.take_along_axis(ids, slots, axis=-1), log


def _picks(follow: Follow, count: int) -> Follow:
    def step(carry: Any, frontier: Frontier) -> tuple[Array, Array, Any]:
        ids, probs, carry = follow(carry, frontier)
        return *likeliest((ids, probs), count), carry

    return step


def row_uniforms(keys: jax.Array, width: int, size: int) -> Callable[[Array], Float[Array, "B W C"]]:
    """depth -> uniforms for the children of the nodes at that depth, from each row's own key."""

    def at(depth: Array) -> Array:
        return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, depth), (width, size)))(keys)

    return at
