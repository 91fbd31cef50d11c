"""Growing draft trees under jit: one loop over levels, and a rule that says what to expand.

Shapes come from the envelope (`TreeSpec`), sizes from the round's `Plan`, so one compiled program serves
every setting. A level has W frontier rows with K children each; M = K + (depth − 1)·W·K of them make the
pool, in creation order: level by level, frontier row by frontier row, best child first. A drafter plugs in
as `step`.

Dynamic trees: EAGLE-2, arXiv 2406.16858 §4.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.errors import BadInput
from eagle4.specs import TreeSpec
from eagle4.tree import topology
from eagle4.types import Draft, Plan, Proposal


class Frontier(NamedTuple):
    """The nodes that a draft step expands, all at `depth` (the root's children are at 1).

    `source` is the row of the previous frontier that holds each node's parent (0 in the first one): gather
    recurrent states with it. `attend` runs over R = depth·W tree rows, of which the step at depth d appends
    d·W − W .. d·W − 1: a node sees its ancestors and itself. Rows that are not `valid` have token 0, source
    0, index −1, score −inf, and see only themselves; whatever the step returns for them is ignored.
    """

    tokens: Int32[Array, "B W"]
    source: Int32[Array, "B W"]
    index: Int32[Array, "B W"]
    score: Float[Array, "B W"]
    valid: Bool[Array, "B W"]
    depth: Int32[Array, ""]
    attend: Bool[Array, "B W R"]


class Pool(NamedTuple):
    """Every child drafted, in creation order; `parent` is a pool index, −1 the root; score −inf: no node.

    `levels` counts the levels that were drafted; None before growing ends.
    """

    tokens: Int32[Array, "B M"]
    parent: Int32[Array, "B M"]
    depth: Int32[Array, "B M"]
    score: Float[Array, "B M"]
    levels: Int32[Array, ""] | None = None


Step = Callable[[Any, Frontier], tuple[Array, Array, Any]]
Extend = Callable[[Plan, Array, Array, Array, Array], Array]
Budget = Callable[[Plan, Array, Array], Array]
Select = Callable[[Array, Array], Array]
Candidates = tuple[Array, Array]


class Decide(NamedTuple):
    """What is decided while a tree grows. Both see scores of nodes, so a tree of draws may ask neither.

    extend: (Plan, frontier scores [B, W], its depth, scores [B, M] of all drafted nodes, their depth [B, M]) -> bool,
            before each draft step: is one more level worth it?
    budget: (Plan, scores [B, M] of all drafted nodes, depth [B, M]) -> nodes to verify, the root counted.
    """

    extend: Extend
    budget: Budget


def planned(
    plan: Plan,
    frontier: Float[Array, "B W"],
    depth: Int32[Array, ""],
    scores: Float[Array, "B M"],
    depths: Int32[Array, "B M"],
) -> Bool[Array, ""]:
    """Draft one more level while the plan asks for it."""
    del frontier, scores, depths
    return jnp.asarray(depth < plan.depth)


def planned_nodes(plan: Plan, scores: Float[Array, "B M"], depth: Int32[Array, "B M"]) -> Int32[Array, ""]:
    """Verify as many nodes as the plan says."""
    del scores, depth
    return plan.nodes


AS_PLANNED = Decide(planned, planned_nodes)


def grow(
    step: Step,
    carry: Any,
    root_children: Candidates,
    envelope: TreeSpec,
    plan: Plan,
    extend: Extend = planned,
    select: Select | None = None,
) -> tuple[Pool, Any]:
    """Draft level by level: expand the W best children of the last level, keep all children in the pool.

    `root_children` are ids and log probabilities [B, K], best first. `step(carry, frontier)` returns the
    same [B, W, K] for the frontier and the new carry. Log probabilities −inf or NaN mean no child, positive
    ones count as 0, so a child never outscores its parent. `extend` (see `Decide`) is the
    loop's predicate: a level that is not wanted is not computed. `select(level scores [B, W·K], depth)`
    returns the slots to expand, −1 for none.
    """
    select = select or _best(envelope.width)
    frontier, pool = _start(root_children, envelope, plan, select)
    batch, width, count = pool.tokens.shape[0], envelope.width, envelope.children
    drafts = (plan.depth >= 1).astype(jnp.int32)
    if envelope.depth <= 1:
        return pool._replace(levels=drafts * envelope.depth), carry

    def more(state: tuple[Frontier, Pool, Any]) -> Array:
        frontier, pool, _ = state
        wanted = extend(plan, frontier.score, frontier.depth, pool.score, pool.depth)
        return (frontier.depth < envelope.depth) & frontier.valid.any() & wanted

    def level(state: tuple[Frontier, Pool, Any]) -> tuple[Frontier, Pool, Any]:
        frontier, pool, carry = state
        ids, logps, carry = step(carry, frontier)
        ids = ids.reshape(batch, -1)
        score = _child_scores(frontier.score, logps, plan).reshape(batch, -1)
        offset = count + (frontier.depth - 1) * width * count
        parent = jnp.repeat(frontier.index, count, axis=1)
        depth = frontier.depth + 1
        pool = _append(pool, offset, ids, parent, depth, score)
        return _frontier(select, ids, score, offset, frontier.attend, depth, plan), pool, carry

    frontier, pool, carry = lax.while_loop(more, level, (frontier, pool, carry))
    return pool._replace(levels=drafts * frontier.depth), carry


def rerank(pool: Pool, root_token: Int32[Array, " B"], nodes: Int32[Array, ""], envelope: TreeSpec) -> Draft:
    """The best `nodes` − 1 of the pool under the root, in creation order, compacted to the front of N slots.

    Ties go to the lower creation index. A parent is never left out: it scores at least as high as its child
    and was created earlier. Unused slots have score −inf and token 0.
    """
    slots = choose(pool.score, nodes, envelope.nodes)
    return assemble(pool, slots, root_token)


def prune(draft: Draft, nodes: Int32[Array, ""]) -> Draft:
    """Cut a draft to `nodes` nodes, root included, in the same N slots.

    Point-mass drafts keep the best path probabilities. Drawn ones (`q` is given) keep the first nodes in
    creation order: a score depends on the draw, and whether a token is verified may not.
    """
    size = draft.tokens.shape[1]
    live = draft.parent[:, 1:] >= 0
    score = jnp.where(live, draft.score[:, 1:], -jnp.inf)
    pool = Pool(draft.tokens[:, 1:], draft.parent[:, 1:] - 1, draft.depth[:, 1:], score, draft.levels)
    slots = choose(score if draft.q is None else creation_order(score), nodes, size)
    kept = assemble(pool, slots, draft.tokens[:, 0])
    if draft.q is None:
        return kept
    before = jnp.pad(jnp.where(slots < size - 1, slots + 1, size - 1), ((0, 0), (1, 0)))
    ids, probs = (jnp.take_along_axis(x, before[:, :, None], axis=1) for x in (draft.q.ids, draft.q.probs))
    return replace(kept, q=Proposal(ids, probs))


def crop(draft: Draft, rows: int) -> Draft:
    """The first `rows` slots of a draft: a smaller shape, for a draft pruned to at most `rows` nodes."""
    q = None if draft.q is None else Proposal(draft.q.ids[:, :rows], draft.q.probs[:, :rows])
    return Draft(
        tokens=draft.tokens[:, :rows],
        parent=draft.parent[:, :rows],
        depth=draft.depth[:, :rows],
        attend=draft.attend[:, :rows, :rows],
        candidate=draft.candidate[:, :rows],
        score=draft.score[:, :rows],
        q=q,
        levels=draft.levels,
    )


def gains(draft: Draft) -> Float[Array, "B N"]:
    """Path probabilities, largest first: entry i is what verifying an (i + 1)-th node adds (root: 1)."""
    return jnp.exp(lax.top_k(draft.score, draft.score.shape[1])[0])


def _child_scores(
    score: Float[Array, "B W"], logps: Float[Array, "B W K"], plan: Plan
) -> Float[Array, "B W K"]:
    logps = logps.astype(jnp.float32)
    wanted = jnp.arange(logps.shape[-1]) < plan.children
    exists = (score > -jnp.inf)[..., None] & (logps > -jnp.inf) & wanted
    # Rounding is monotone, so a non-positive term keeps a child at or below its parent exactly.
    return jnp.where(exists, score[..., None] + jnp.minimum(logps, 0.0), -jnp.inf)


def _start(
    root_children: Candidates, envelope: TreeSpec, plan: Plan, select: Select
) -> tuple[Frontier, Pool]:
    """The root's children, padded to a whole level of which only the first row exists."""
    ids, logps = root_children
    batch, count = ids.shape
    width, unused = envelope.width, (envelope.width - 1) * envelope.children
    if count != envelope.children:
        raise BadInput(f"the drafter gives {count} root children, tree.children is {envelope.children}")
    root = jnp.where(plan.depth >= 1, jnp.zeros((batch, 1)), -jnp.inf)
    score = _child_scores(root, logps[:, None], plan)[:, 0]
    pool = _append(_empty_pool(batch, envelope), 0, ids, jnp.full(ids.shape, -1), jnp.int32(1), score)
    seen = jnp.zeros((batch, width, envelope.depth * width), bool)
    level_ids = jnp.pad(ids, ((0, 0), (0, unused)))
    level_score = jnp.pad(score, ((0, 0), (0, unused)), constant_values=-jnp.inf)
    return _frontier(select, level_ids, level_score, jnp.int32(0), seen, jnp.int32(1), plan), pool


def _empty_pool(batch: int, envelope: TreeSpec) -> Pool:
    size = envelope.children * (1 + max(envelope.depth - 1, 0) * envelope.width)
    zero = jnp.zeros((batch, size), jnp.int32)
    return Pool(zero, zero, zero, jnp.full((batch, size), -jnp.inf))


def _append(pool: Pool, offset: Array | int, ids: Array, parent: Array, depth: Array, score: Array) -> Pool:
    ids = jnp.where(score > -jnp.inf, ids, 0).astype(jnp.int32)
    new = (ids, parent.astype(jnp.int32), jnp.broadcast_to(depth, ids.shape), score)
    return Pool(*(lax.dynamic_update_slice_in_dim(a, b, offset, axis=1) for a, b in zip(pool[:4], new)))


def _frontier(
    select: Select,
    ids: Int32[Array, "B WK"],
    score: Float[Array, "B WK"],
    offset: Array,
    seen: Bool[Array, "B W R"],
    depth: Array,
    plan: Plan,
) -> Frontier:
    """The nodes to expand at `depth`, chosen among a level; `seen` is the previous frontier's attend mask."""
    width = seen.shape[1]
    slots = select(score, depth)
    inside = (slots >= 0) & (jnp.arange(width) < plan.width)
    slots = jnp.where(inside, slots, 0)
    score = jnp.where(inside, jnp.take_along_axis(score, slots, axis=1), -jnp.inf)
    valid = score > -jnp.inf
    source = jnp.where(valid, slots // (ids.shape[1] // width), 0)
    own = jnp.arange(seen.shape[2]) == ((depth - 1) * width + jnp.arange(width))[:, None]
    above = jnp.take_along_axis(seen, source[:, :, None], axis=1) & valid[:, :, None]
    return Frontier(
        tokens=jnp.where(valid, jnp.take_along_axis(ids, slots, axis=1), 0).astype(jnp.int32),
        source=source,
        index=jnp.where(valid, offset + slots, -1),
        score=score,
        valid=valid,
        depth=depth,
        attend=above | own,
    )


def _best(width: int) -> Select:
    return lambda scores, depth: lax.top_k(scores, width)[1]


def creation_order(score: Float[Array, "B M"]) -> Float[Array, "B M"]:
    """A priority for `choose` that looks at no score: earlier nodes first."""
    return jnp.where(score > -jnp.inf, -jnp.arange(score.shape[1], dtype=jnp.float32), -jnp.inf)


def choose(priority: Float[Array, "B M"], nodes: Array, size: int) -> Int32[Array, "B N1"]:
    """Pool indices of the `nodes` − 1 highest priorities, ascending; M where there is none, size − 1 in all.

    Ties go to the lower index; priority −inf is never chosen.
    """
    pool_size = priority.shape[1]
    limit = min(size - 1, pool_size)
    best, slots = lax.top_k(priority, limit)
    kept = (best > -jnp.inf) & (jnp.arange(limit) < nodes - 1)
    slots = jnp.sort(jnp.where(kept, slots, pool_size), axis=1)
    return jnp.pad(slots, ((0, 0), (0, size - 1 - limit)), constant_values=pool_size)


def assemble(pool: Pool, slots: Int32[Array, "B N1"], root_token: Int32[Array, " B"]) -> Draft:
    """The draft of the chosen pool indices under the root; `slots` must hold every chosen node's parent."""
    kept = slots < pool.score.shape[1]
    index = jnp.where(kept, slots, 0)

    def take(values: Array, empty: float) -> Array:
        return jnp.where(kept, jnp.take_along_axis(values, index, axis=1), empty).astype(values.dtype)

    above = take(pool.parent, -1)
    # Slots ascend, so a parent's node id is the number of chosen slots before it, plus one for the root.
    renumbered = jnp.where(above < 0, 0, 1 + (slots[:, None] < above[:, :, None]).sum(2, dtype=jnp.int32))
    front = ((0, 0), (1, 0))
    parent = jnp.pad(jnp.where(kept, renumbered, -1), front, constant_values=-1)
    return Draft(
        tokens=jnp.concatenate([root_token[:, None].astype(jnp.int32), take(pool.tokens, 0)], axis=1),
        parent=parent,
        depth=jnp.pad(take(pool.depth, 0), front),
        attend=topology.ancestors(parent),
        candidate=jnp.pad(kept, front),
        score=jnp.pad(take(pool.score, -jnp.inf), front),
        q=None,
        levels=pool.levels,
    )
