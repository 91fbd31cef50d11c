"""EAGLE-1, 2, 3 and 3.1: a one-layer network that drafts trees from the target's own features.

EAGLE arXiv 2401.15077, EAGLE-2 arXiv 2406.16858 (dynamic trees), EAGLE-3 arXiv 2503.01840 (taps, own states),
EAGLE-3.1 (normed taps, normed recurrence). Which one it is, `EagleSpec` says; the algebra is in `eagle_net`.

The drafter's cache holds committed rows only, one per pair (features of position i, token of position i + 1). A
round's tree rows live in a buffer of the round and are thrown away: the accepted ones come back through `commit` with
the target's features instead of the drafter's guesses. Committed pairs wait until the network is next needed, or until
no more fit: rounds that draft nothing share one pass.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.drafters import eagle_net as net
from eagle4.drafters.base import Drafter
from eagle4.drafters.tree_drafting import draft_tree
from eagle4.errors import BadInput
from eagle4.nn.attention import attention
from eagle4.retrieval.shortlist import SELECTIONS, retrieve
from eagle4.specs import DrafterSpec, EagleSpec, RetrievalSpec, TreeSpec
from eagle4.target import cache as kv
from eagle4.tree.grow import Decide, Frontier
from eagle4.types import Commit, KVCache


@struct.dataclass
class EagleState:
    """Committed rows of the layer, one entry in `cache.k` and `cache.v`, and the layer's output at the last of them.

    `waiting` are the pairs committed after those, Q places of which the first `num_committed` are filled.
    """

    cache: KVCache
    output: Float[Array, "B D"]
    waiting: Commit


# (params, output [*T, D]) -> candidate ids and probabilities [*T, C]
Find = Callable[[dict[str, Any], Float[Array, "*T D"]], tuple[Array, Array]]


class Branches(NamedTuple):
    """A round's tree rows (R = depth · width) and the output of each frontier row, which its children read."""

    k: Float[Array, "B G R E"]
    v: Float[Array, "B G R E"]
    output: Float[Array, "B W D"]


def make(spec: DrafterSpec, tree: TreeSpec, decide: Decide) -> Drafter:
    """`params` is the tree of `eagle_net.abstract`, with the target's embedding and head (`eagle_net.borrow`)."""
    eagle = spec.eagle
    if eagle is None or eagle.layer is None:
        raise BadInput("drafter.name=eagle needs a trained network; give drafter.checkpoint=<folder>")
    if spec.retrieval is not None and 0 < eagle.draft_vocab < eagle.layer.vocab_size:
        raise BadInput(
            "drafter.retrieval searches the whole vocabulary; it does not go with a reduced head (eagle.draft_vocab)"
        )
    if tree.kind == "chain":
        tree = replace(tree, width=1, children=1)
    find = partial(candidates, eagle, spec.retrieval, tree)

    def init(params, tokens, length):
        # As many pairs may wait as one round can commit: the room that a row has anyway.
        return empty(params, eagle, tokens, tree.depth + 1)

    def propose(params, state: EagleState, root, plan, keys):
        state, root_q = lax.cond(plan.depth > 0, opened, unopened, params, state)
        start = Branches(*empty_rows(eagle, state, tree.depth * tree.width), wide(state.output, tree.width))
        follow = draft_step(params, eagle, state, tree, find)
        guesses, _ = draft_tree(tree, follow, start, root, root_q, keys, plan, decide)
        return guesses, state

    def opened(params, state):
        state = settle(params, eagle, state)
        return state, find(params, state.output)

    def unopened(params, state):
        """Nothing is wanted: no candidate has a probability."""
        shapes = jax.eval_shape(find, params, state.output)
        return state, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def commit(params, state: EagleState, commit: Commit, start):
        return keep(params, eagle, state, commit, start)

    return Drafter(init=init, propose=propose, commit=commit)


def empty(params: dict[str, Any], eagle: EagleSpec, tokens: Int32[Array, "B S"], waiting: int) -> EagleState:
    """No row committed yet, room for as many as the row's text can hold; so many pairs may wait."""
    assert eagle.layer is not None
    batch, capacity = tokens.shape
    dtype, taps, width = params["embed"].dtype, len(eagle.taps), target_width(params, eagle)
    return EagleState(
        kv.allocate(eagle.layer, batch, capacity, dtype),
        jnp.zeros((batch, eagle.layer.hidden_size), dtype),
        Commit(
            tokens=jnp.zeros((batch, waiting), jnp.int32),
            num_committed=jnp.zeros(batch, jnp.int32),
            features=jnp.zeros((batch, waiting, taps, width), dtype),
            hidden=jnp.zeros((batch, waiting, width), dtype),
        ),
    )


def target_width(params: dict[str, Any], eagle: EagleSpec) -> int:
    """How wide the target's states are, as fc reads them."""
    return params["fc"].shape[1] // (len(eagle.taps) or 2)


def keep(
    params: dict[str, Any], eagle: EagleSpec, state: EagleState, commit: Commit, start: Int32[Array, " B"]
) -> EagleState:
    """Let a round's pairs wait, behind those that fit no more; a chunk of the prompt is fed at once."""
    places = state.waiting.tokens.shape[1]
    if commit.tokens.shape[1] > places:
        return feed(params, eagle, settle(params, eagle, state), commit, start)
    full = jnp.any(state.waiting.num_committed + commit.num_committed > places)
    state = lax.cond(full, lambda s: settle(params, eagle, s), lambda s: s, state)
    before, new = state.waiting.num_committed, commit.num_committed
    place = jnp.arange(commit.tokens.shape[1])
    place = jnp.where(place < new[:, None], before[:, None] + place, places)
    rows = jnp.arange(len(before))[:, None]

    def joined(waiting: Array, more: Array) -> Array:
        return waiting.at[rows, place].set(more, mode="drop")

    return replace(
        state,
        waiting=Commit(
            tokens=joined(state.waiting.tokens, commit.tokens),
            num_committed=before + new,
            features=joined(state.waiting.features, commit.features),
            hidden=joined(state.waiting.hidden, commit.hidden),
        ),
    )


def settle(params: dict[str, Any], eagle: EagleSpec, state: EagleState) -> EagleState:
    """Feed what waits."""
    return feed(params, eagle, state, state.waiting, state.cache.length)


def feed(
    params: dict[str, Any], eagle: EagleSpec, state: EagleState, commit: Commit, start: Int32[Array, " B"]
) -> EagleState:
    """Run committed pairs through the layer and keep their rows: a chunk of the prompt, or what a round accepted."""
    rows = commit.tokens.shape[1]
    at = start[:, None] + jnp.arange(rows, dtype=jnp.int32)
    row = net.enter(params, eagle, commit.tokens, net.fuse(params, eagle, commit.features, commit.hidden), at)
    earlier, slot = recent(eagle, state.cache)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (len(start), rows, rows))
    see_new = within(eagle, causal, at, at)
    see_cached = within(
        eagle, (slot < state.cache.length[:, None])[:, None] & jnp.ones((1, rows, 1), bool), at, slot
    )
    mixed = attention(row.q, (row.k, row.v), see_new, earlier, see_cached)
    output = net.leave(params, eagle, row.residual, mixed)
    count = commit.num_committed
    last = jnp.take_along_axis(output, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return EagleState(
        kv.write(state.cache, (row.k,), (row.v,), count),
        jnp.where((count > 0)[:, None], last, state.output),
        replace(state.waiting, num_committed=jnp.zeros_like(count)),
    )


def draft_step(params: dict[str, Any], eagle: EagleSpec, state: EagleState, tree: TreeSpec, find: Find):
    """The draft step: all frontier rows in one pass, each with its parent's output, then the head."""

    def follow(carry: Branches, frontier: Frontier):
        carry = branch(params, eagle, state, tree, carry, frontier)
        return *find(params, carry.output), carry

    return follow


def branch(
    params: dict[str, Any],
    eagle: EagleSpec,
    state: EagleState,
    tree: TreeSpec,
    carry: Branches,
    frontier: Frontier,
) -> Branches:
    """The layer over a frontier, which sees the committed rows and its own ancestors' tree rows.

    The window is anchored at the last committed position: while drafting the cache is only appended to.
    """
    earlier, slot = recent(eagle, state.cache)
    committed = jnp.repeat((slot < state.cache.length[:, None])[:, None], tree.width, axis=1)
    see_cached = within(eagle, committed, state.cache.length[:, None] - 1, slot)
    with jax.named_scope("draft_body"):
        parents = jnp.take_along_axis(carry.output, frontier.source[..., None], axis=1)
        at = jnp.broadcast_to(state.cache.length[:, None] + frontier.depth - 1, frontier.tokens.shape)
        row = net.enter(params, eagle, frontier.tokens, net.recurrent(params, eagle, parents), at)
        place = (frontier.depth - 1) * tree.width
        k, v = (
            lax.dynamic_update_slice_in_dim(rows, new.astype(rows.dtype), place, axis=2)
            for rows, new in ((carry.k, row.k), (carry.v, row.v))
        )
        mixed = attention(row.q, (k, v), frontier.attend, earlier, see_cached)
        return Branches(k, v, net.leave(params, eagle, row.residual, mixed))


def candidates(
    eagle: EagleSpec,
    retrieval: RetrievalSpec | None,
    tree: TreeSpec,
    params: dict[str, Any],
    output: Float[Array, "*T D"],
) -> tuple[Int32[Array, "*T C"], Float[Array, "*T C"]]:
    """Candidates for the next token with their probabilities.

    With retrieval: the shortlist. Else the likeliest of the head, or for drawn trees all of it.
    """
    if retrieval is not None:
        find = SELECTIONS[retrieval.selection]
        state = net.scored(params, eagle, output)
        return retrieve(params["factors"], params["head"], state, retrieval.candidates, find)
    scores = lax.optimization_barrier(net.logits(params, eagle, output))
    if tree.kind == "sampled":
        places = jnp.broadcast_to(jnp.arange(scores.shape[-1], dtype=jnp.int32), scores.shape)
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        # The barrier above keeps XLA:CPU from fusing top_k into the product, which takes thirty times as long.
        if tree.children > scores.shape[-1]:
            raise BadInput(
                f"tree.children is {tree.children} but the drafter scores only {scores.shape[-1]} ids; lower it"
            )
        best, places = lax.top_k(scores, tree.children)
        probs = jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return (jnp.take(params["draft_ids"], places) if "draft_ids" in params else places), probs


def empty_rows(eagle: EagleSpec, state: EagleState, rows: int) -> tuple[Array, Array]:
    """Key and value buffers for a round's tree rows."""
    assert eagle.layer is not None
    shape = (state.output.shape[0], eagle.layer.num_kv_heads, max(rows, 1), eagle.layer.head_dim)
    return jnp.zeros(shape, state.output.dtype), jnp.zeros(shape, state.output.dtype)


def wide(output: Float[Array, "B D"], width: int) -> Float[Array, "B W D"]:
    """The last committed output for every row of the first frontier: the root's children have source 0."""
    return jnp.broadcast_to(output[:, None], (output.shape[0], width, output.shape[1]))


def recent(
    eagle: EagleSpec, cache: KVCache
) -> tuple[tuple[Float[Array, "B G S2 E"], Float[Array, "B G S2 E"]], Int32[Array, "B S2"]]:
    """The cached rows that a window can show, and their positions: beyond the window a draft's cost stays flat.

    Without a window, or in a short cache, these are all rows.
    """
    k, v = cache.k[0], cache.v[0]
    size = eagle.window
    if not size or size >= k.shape[2]:
        return (k, v), jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), (k.shape[0], k.shape[2]))
    begin = jnp.clip(cache.length - size, 0, k.shape[2] - size)

    def cut(slots: Array, at: Array) -> Array:
        return lax.dynamic_slice_in_dim(slots, at, size, axis=1)

    return (jax.vmap(cut)(k, begin), jax.vmap(cut)(v, begin)), begin[:, None] + jnp.arange(size)


def within(
    eagle: EagleSpec, see: Bool[Array, "B N S2"], at: Int32[Array, "B N"], slot: Int32[Array, "B S2"]
) -> Bool[Array, "B N S2"]:
    """`see`, and at most `window` − 1 positions back."""
    return see & (at[:, :, None] - slot[:, None, :] < eagle.window) if eagle.window else see
