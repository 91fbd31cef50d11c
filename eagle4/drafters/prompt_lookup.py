"""Prompt lookup: guess that text which followed the same n-gram before follows it again.

Saxena, "Prompt Lookup Decoding" (2023); the matching rule (longest suffix first, earliest occurrence on ties) is the
one serving engines use. With `matches` > 1 the continuations of several occurrences are merged into a trie.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int32

from eagle4.drafters.base import Drafter
from eagle4.specs import DrafterSpec, TreeSpec
from eagle4.tree.grow import Decide
from eagle4.tree.topology import ancestors, depths
from eagle4.types import Commit, Draft, Plan


@struct.dataclass
class History:
    """Committed text of each row, right-padded: `length` tokens, the root included."""

    tokens: Int32[Array, "B S"]
    length: Int32[Array, " B"]


def make(spec: DrafterSpec, tree: TreeSpec, decide: Decide) -> Drafter:
    """A drafter whose children are deterministic picks (q = None), at most `tree.depth` deep."""
    del decide

    def propose(params, state: History, root, plan: Plan, keys):
        del params, keys
        ends, found = jax.vmap(lambda t, n: occurrences(t, n, spec))(state.tokens, state.length)
        guesses, valid = jax.vmap(continuations, in_axes=(0, 0, 0, 0, None))(
            state.tokens, state.length, ends, found, tree.depth
        )
        valid = valid & (jnp.arange(tree.depth) < plan.depth)
        return trie(root, guesses, valid, plan.nodes, tree.nodes), state

    def commit(params, state: History, commit: Commit, start):
        del params
        P1 = commit.tokens.shape[1]
        fresh = jnp.arange(P1) < commit.num_committed[:, None]
        slot = jnp.where(fresh, start[:, None] + 1 + jnp.arange(P1), state.tokens.shape[1])
        rows = jnp.arange(slot.shape[0])[:, None]
        tokens = state.tokens.at[rows, slot].set(commit.tokens, mode="drop")
        end = jnp.where(commit.num_committed > 0, start + 1 + commit.num_committed, 0)
        return History(tokens, jnp.maximum(state.length, end))

    return Drafter(
        init=lambda params, tokens, length: History(tokens, length), propose=propose, commit=commit
    )


def occurrences(
    tokens: Int32[Array, " S"], length: Int32[Array, ""], spec: DrafterSpec
) -> tuple[Int32[Array, " M"], Bool[Array, " M"]]:
    """Last positions of the best earlier occurrences of the text's own suffix, and whether each is one at all.

    Best: longest common suffix (up to max_ngram, at least min_ngram), then earliest.
    """
    S = tokens.shape[0]
    end = jnp.arange(S)
    matched = jnp.zeros(S, jnp.int32)
    alive = end < length - 1
    for i in range(spec.max_ngram):
        suffix = tokens[jnp.maximum(length - 1 - i, 0)]
        alive = alive & (end >= i) & (tokens[jnp.maximum(end - i, 0)] == suffix)
        matched = matched + alive
    rank = jnp.where(matched >= spec.min_ngram, matched * S + (S - end), 0)
    best, where = lax.top_k(rank, spec.matches)
    return where.astype(jnp.int32), best > 0


def continuations(
    tokens: Int32[Array, " S"],
    length: Int32[Array, ""],
    ends: Int32[Array, " M"],
    found: Bool[Array, " M"],
    depth: int,
) -> tuple[Int32[Array, "M D"], Bool[Array, "M D"]]:
    """The `depth` tokens after each occurrence; text that does not exist yet is not valid."""
    index = ends[:, None] + 1 + jnp.arange(depth)
    valid = found[:, None] & (index < length)
    return jnp.where(valid, tokens[jnp.minimum(index, tokens.shape[0] - 1)], 0), valid


def trie(
    root: Int32[Array, " B"],
    guesses: Int32[Array, "B M D"],
    valid: Bool[Array, "B M D"],
    nodes: Int32[Array, ""],
    envelope: int,
) -> Draft:
    """Merge M chains that share prefixes into one tree of at most `nodes` nodes (the root counts).

    A chain's node is dropped where an earlier chain has the same path; its children then hang from that one. Nodes
    stand branch by branch, so parents precede children and the best occurrence is tried first.
    """
    B, M, D = guesses.shape
    same = (guesses[:, :, None] == guesses[:, None]) & valid[:, :, None] & valid[:, None]
    shared = jnp.cumprod(same, axis=-1).astype(bool)
    owner = jnp.argmax(shared, axis=2).astype(jnp.int32)
    keep = valid & (owner == jnp.arange(M)[:, None])
    slot = jnp.where(keep, jnp.cumsum(keep.reshape(B, -1), axis=-1).reshape(B, M, D), 0)
    keep = keep & (slot < jnp.minimum(nodes, envelope))
    above = owner[..., :-1] * D + jnp.arange(D - 1)
    deeper = jnp.take_along_axis(slot.reshape(B, -1), above.reshape(B, -1), axis=-1).reshape(above.shape)
    parent = jnp.concatenate([jnp.zeros((B, M, 1), jnp.int32), deeper], axis=-1)[..., :D]
    place = jnp.where(keep, slot, envelope).reshape(B, -1)
    rows = jnp.arange(B)[:, None]

    def scatter(initial: Array, values: Array) -> Array:
        return initial.at[rows, place].set(values.reshape(B, -1), mode="drop")

    parents = scatter(jnp.full((B, envelope), -1, jnp.int32), parent)
    return Draft(
        tokens=scatter(jnp.zeros((B, envelope), jnp.int32).at[:, 0].set(root), guesses),
        parent=parents,
        depth=depths(parents),
        attend=ancestors(parents),
        candidate=scatter(jnp.zeros((B, envelope), bool), keep),
        score=jnp.zeros((B, envelope), jnp.float32),
        q=None,
    )
