"""A drafter for tests: a noisy copy of the target that remembers one token, so that trees meet real disagreement."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from kit import numpy_logits, tiny_params

from eagle4.drafters import DRAFTERS
from eagle4.drafters.base import Drafter
from eagle4.drafters.bigram import lookup
from eagle4.drafters.tree_drafting import draft_tree, row_uniforms
from eagle4.sampling import draw
from eagle4.specs import DrafterSpec, ModelSpec, TreeSpec
from eagle4.tree.grow import assemble, choose, creation_order, grow
from eagle4.types import Commit, Draft, Plan, Proposal


@struct.dataclass
class Seen:
    """What was fed: text and features by position, and how far. Slots beyond `length` are zero."""

    tokens: jax.Array
    features: jax.Array
    hidden: jax.Array
    length: jax.Array


@cache
def toy_params(model: ModelSpec, seed: int = 0, taps: int = 0, candidates: int = 0, noise: float = 0.3):
    """q(next | last token) as ids and probs [V, C]: the target after that token alone, with noise.

    `candidates` 0 means the whole vocabulary in order, otherwise the likeliest C, renormalised. `taps` is how many
    features the system reads: the state records them, so that what a round commits can be checked.
    """
    V = model.vocab_size
    weights = tiny_params(model, seed)
    logits = np.stack([numpy_logits(weights, model, [t])[0] for t in range(V)])
    logits = logits + noise * np.random.default_rng(seed).normal(size=(V, V))
    order = np.argsort(-logits, axis=1)[:, :candidates] if candidates else np.tile(np.arange(V), (V, 1))
    weight = np.exp(np.take_along_axis(logits - logits.max(1, keepdims=True), order, axis=1))
    probs = weight / weight.sum(1, keepdims=True)
    return {
        "ids": jnp.array(order, jnp.int32),
        "probs": jnp.array(probs, jnp.float32),
        "blank": jnp.zeros((taps, model.hidden_size)),
        "junk": jnp.array(False),
    }


def toy(spec: DrafterSpec, tree: TreeSpec, decide) -> Drafter:
    """Every kind of tree over the table."""

    def propose(params, state, root, plan, keys):
        follow, root_q = lookup(params, root)
        draft, _ = draft_tree(tree, follow, (), root, root_q, keys, plan, decide)
        return spoil(params, draft), state

    return Drafter(init, propose, feed)


def toy_independent(spec: DrafterSpec, tree: TreeSpec, decide) -> Drafter:
    """Children drawn with replacement, so that siblings may be equal; the shape is that of `sampled`."""

    def propose(params, state, root, plan: Plan, keys):
        C = params["ids"].shape[1]
        uniforms = row_uniforms(keys, tree.width, tree.children)

        def children(tokens, u):
            probs = jnp.repeat(params["probs"][tokens].reshape(-1, C), tree.children, axis=0)
            slots = draw(probs, u.reshape(-1)).reshape(u.shape)
            ids, probs = (jnp.take_along_axis(params[k][tokens], slots, axis=-1) for k in ("ids", "probs"))
            return ids, jnp.log(probs)

        def step(carry, frontier):
            return *children(frontier.tokens, uniforms(frontier.depth)), carry

        first = children(root[:, None], uniforms(jnp.int32(0))[:, :1])
        first = tuple(x[:, 0] for x in first)
        pool, _ = grow(step, (), first, tree, plan, decide.extend, first_children(tree))
        drawn = assemble(pool, choose(creation_order(pool.score), plan.nodes, tree.nodes), root)
        q = Proposal(params["ids"][drawn.tokens], params["probs"][drawn.tokens])
        return spoil(params, replace(drawn, q=q)), state

    return Drafter(init, propose, feed)


def spoil(params, draft: Draft) -> Draft:
    """Where `params["junk"]` says so, junk in slots without a node: ids outside the vocabulary embed as NaN."""
    unused = params["junk"] & ~draft.candidate & (jnp.arange(draft.tokens.shape[1]) > 0)
    q = draft.q
    if q is not None:
        row = unused[..., None]
        q = Proposal(jnp.where(row, -1, q.ids), jnp.where(row, jnp.nan, q.probs))
    tokens = jnp.where(unused, 10_000, draft.tokens)
    return replace(draft, tokens=tokens, score=jnp.where(unused, jnp.nan, draft.score), q=q)


def first_children(tree: TreeSpec):
    """A frontier that no draw decides: the first child of every row, then the second ones."""
    row, rank = np.divmod(np.arange(tree.width * tree.children), tree.children)
    order = np.argsort(rank * tree.width + row)[: tree.width]

    def select(scores, depth):
        # At depth 1 only the first frontier row exists.
        slots = jnp.where(depth == 1, jnp.arange(tree.width), jnp.array(order))
        there = (depth > 1) | (jnp.arange(tree.width) < tree.children)
        return jnp.broadcast_to(jnp.where(there, slots, -1), (scores.shape[0], tree.width))

    return select


def init(params, tokens, length) -> Seen:
    B, S = tokens.shape
    A, D = params["blank"].shape
    empty = jnp.zeros_like(length)
    return Seen(jnp.zeros_like(tokens), jnp.zeros((B, S, A, D)), jnp.zeros((B, S, D)), empty)


def feed(params, state: Seen, commit: Commit, start) -> Seen:
    """Write features at their own position and each token one further, as an EAGLE drafter would read them."""
    del params
    S = state.tokens.shape[1]
    i = jnp.arange(commit.tokens.shape[1])
    real = i < commit.num_committed[:, None]
    rows = jnp.arange(len(start))[:, None]
    slot = jnp.where(real, start[:, None] + i, S)
    return Seen(
        tokens=state.tokens.at[rows, jnp.where(real, slot + 1, S)].set(commit.tokens, mode="drop"),
        features=state.features.at[rows, slot].set(commit.features, mode="drop"),
        hidden=state.hidden.at[rows, slot].set(commit.hidden, mode="drop"),
        length=jnp.maximum(
            state.length, jnp.where(commit.num_committed > 0, start + commit.num_committed, 0)
        ),
    )


DRAFTERS["toy"] = toy
DRAFTERS["toy_independent"] = toy_independent
