"""Walking a recording: the rounds that decoding would have run under other settings, without any network.

A round at answer token i drafts a tree that depends on the text alone, and the text at temperature 0 is known. What is
left of a round is what the policy decides, how far the chosen nodes follow the text, and what the cost table says it
took. The decisions are taken by the policy's own functions (`eagle4.harness`), so they are those of the loop.

At temperature > 0 the recorded answer is one draw of the target's. Point-mass acceptance gives a draft token exactly
the target's probability, so a walk along that answer is one draw of real decoding too; `expected` has less noise.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4 import decode
from eagle4.harness import costs as cost
from eagle4.harness.costs import CostTable, Grid
from eagle4.harness.policies import POLICIES
from eagle4.harness.policy import Policy
from eagle4.policy_spec import PolicySpec
from eagle4.recording import Recorded
from eagle4.specs import TreeSpec
from eagle4.types import Plan, RoundInfo


class Tape(NamedTuple):
    """One variant of Q recorded answers as arrays: P positions, M nodes, D levels, W frontier rows.

    `rank` [.., l, m] is a node's place among the nodes of at most l levels, best score first, ties to the earlier one;
    `frontier` [.., d − 1] are the W best scores of level d, best first; `path` the chance under the target that a node
    is accepted. `length` counts an answer's tokens, `context` the cache slots that its rounds read.
    """

    score: Float[Array, "Q P M"]
    depth: Int32[Array, "Q P M"]
    match: Bool[Array, "Q P M"]
    path: Float[Array, "Q P M"]
    frontier: Float[Array, "Q P D W"]
    rank: Int32[Array, "Q P L M"]
    length: Int32[Array, " Q"]
    context: Int32[Array, " Q"]


class History(NamedTuple):
    """Rounds of every setting and answer, [R, settings, Q] each. `active` is False after an answer's end, where the
    rest is 0. `rows`: nodes verified, the root and what fills the bucket counted; `nodes`: drafted ones among them;
    `expected`: tokens this round would commit on average over the target's draws, NaN without probabilities. Costs are
    the table's: a round is `first_ms` + `steps_ms` + `verify_ms`.
    """

    active: np.ndarray
    position: np.ndarray
    levels: np.ndarray
    nodes: np.ndarray
    rows: np.ndarray
    accepted: np.ndarray
    committed: np.ndarray
    expected: np.ndarray
    first_ms: np.ndarray
    steps_ms: np.ndarray
    verify_ms: np.ndarray


def tape(answers: Sequence[Recorded], variant: str, depth: int, width: int, context: Sequence[int]) -> Tape:
    """A variant's trees down to `depth` levels, side by side; `width` is the envelope's number of frontier rows."""
    trees = [a.trees[variant] for a in answers]
    P = max(max((len(t.score) for t in trees), default=0), 1)
    M = trees[0].score.shape[1]

    def stacked(field: str, empty: Any, kind: Any) -> np.ndarray:
        values = np.full((len(trees), P, M), empty, kind)
        for row, tree in zip(values, trees):
            row[: len(tree.score)] = getattr(tree, field)
        return values

    level, score = stacked("depth", 0, np.int32), stacked("score", -np.inf, np.float32)
    real = (score > -np.inf) & (level <= depth)
    score, level = np.where(real, score, np.float32(-np.inf)), np.where(real, level, 0)
    ranks = [ranked(np.where(level <= d, score, -np.inf)) for d in range(depth + 1)]
    fronts = [frontier(np.where(level == d, score, -np.inf), width) for d in range(1, depth + 1)]
    parent, prob = stacked("parent", -1, np.int32), stacked("prob", np.nan, np.float32)
    return Tape(
        score=jnp.asarray(score),
        depth=jnp.asarray(level),
        match=jnp.asarray(stacked("match", False, bool) & real),
        path=jnp.asarray(paths(parent, prob)),
        frontier=jnp.asarray(
            np.stack(fronts, 2) if fronts else np.zeros((len(trees), P, 0, width), np.float32)
        ),
        rank=jnp.asarray(np.stack(ranks, 2)),
        length=jnp.asarray([a.length for a in answers], jnp.int32),
        context=jnp.asarray(context, jnp.int32),
    )


def ranked(score: np.ndarray) -> np.ndarray:
    """Each node's place, best score first and ties to the lower index; M where there is no node."""
    order = np.argsort(-score, axis=-1, kind="stable")
    place = np.empty(order.shape, np.int32)
    np.put_along_axis(
        place, order, np.broadcast_to(np.arange(score.shape[-1], dtype=np.int32), order.shape), -1
    )
    return np.where(score > -np.inf, place, score.shape[-1]).astype(np.int32)


def frontier(score: np.ndarray, width: int) -> np.ndarray:
    """The `width` best scores, best first, −inf where there are fewer."""
    best = -np.sort(-score, axis=-1)[..., :width]
    short = width - best.shape[-1]
    return np.pad(best, (*[(0, 0)] * (best.ndim - 1), (0, max(short, 0))), constant_values=-np.inf).astype(
        np.float32
    )


def paths(parent: np.ndarray, prob: np.ndarray) -> np.ndarray:
    """Products of `prob` from the root down to every node."""
    path = prob.copy()
    for m in range(parent.shape[-1]):
        above = parent[..., m]
        upper = np.take_along_axis(path, np.maximum(above, 0)[..., None], -1)[..., 0]
        path[..., m] = np.where(above >= 0, prob[..., m] * upper, prob[..., m])
    return path


def walk(
    recorded: Tape, tree: TreeSpec, policies: Sequence[PolicySpec], costs: CostTable, batch: int = 1
) -> History:
    """Every answer under every policy (of one kind), all side by side.

    `tree` is the envelope that decoding would be compiled for. `batch` prices each answer as that many copies of it
    decoded together: they decide alike, and a round costs what the table says at this batch.
    """
    rules = [POLICIES[p.name](p, tree) for p in policies]
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(rule.init() for rule in rules))
    done = decode.jit_call(walker(tree, policies[0].name), recorded, states, at_batch(costs, batch))
    count = int(done[1])
    return History(*(np.asarray(values)[:count] for values in done[0]))


def whole_trees(recorded: Tape, tree: TreeSpec) -> list[RoundInfo]:
    """What a fixed policy would have seen at every position of every answer: rounds to calibrate by, each with its
    whole tree of `tree.nodes`, a RoundInfo with a leading axis of positions an answer."""
    chosen = np.asarray(recorded.rank)[:, :, -1] < tree.nodes - 1
    depth = np.where(chosen, np.asarray(recorded.depth), 0)
    taken = chosen & np.asarray(recorded.match)
    score = np.where(chosen, np.asarray(recorded.score), -np.inf)
    accepted, found = np.where(taken, depth, 0).max(-1), []
    for q, length in enumerate(np.asarray(recorded.length)):
        P = max(int(length) - 1, 0)
        none = jnp.zeros(P, jnp.int32)
        info = RoundInfo(
            active=jnp.ones((P, 1), bool),
            drafted_depth=jnp.asarray(depth[q, :P].max(-1, initial=0))[:, None],
            drafted_nodes=jnp.asarray(chosen[q, :P].sum(-1))[:, None],
            verified_nodes=none + tree.nodes,
            num_accepted=jnp.asarray(accepted[q, :P])[:, None],
            num_committed=jnp.asarray(accepted[q, :P])[:, None] + 1,
            levels=none + recorded.frontier.shape[2],
            score=jnp.asarray(score[q, :P])[:, None],
            depth=jnp.asarray(depth[q, :P])[:, None],
            taken=jnp.asarray(taken[q, :P])[:, None],
            predicted_ms=none * jnp.nan,
        )
        found.append(info)
    return found


def at_batch(costs: CostTable, batch: int) -> CostTable:
    """The table at one batch size, whatever number of rows it is asked for."""

    def cut(grid: Grid) -> Grid:
        point = jnp.asarray([batch], jnp.float32)
        i = jnp.clip(jnp.searchsorted(grid.batch, point[0], side="right") - 1, 0, max(len(grid.batch) - 2, 0))
        if len(grid.batch) == 1:
            return grid._replace(batch=point)
        u = jnp.clip((point[0] - grid.batch[i]) / (grid.batch[i + 1] - grid.batch[i]), 0.0, 1.0)
        return grid._replace(batch=point, ms=((1 - u) * grid.ms[i] + u * grid.ms[i + 1])[None])

    return CostTable(*map(cut, costs))


@cache
def walker(tree: TreeSpec, name: str) -> Callable[..., tuple[tuple[Array, ...], Array]]:
    """(tape, policy states [settings], costs) -> the fields of History and how many rounds there were."""
    rule = POLICIES[name](PolicySpec(name=name), tree)

    def lane(recorded: Tape, position, state, costs):
        return one_round(rule, tree, recorded, position, state, costs)

    by_answer = jax.vmap(lane, in_axes=(0, 0, 0, None))
    side_by_side = jax.vmap(by_answer, in_axes=(None, 0, 0, None))

    def run(recorded: Tape, states: Any, costs: CostTable):
        S, Q = jax.tree.leaves(states)[0].shape[0], recorded.length.shape[0]
        states = jax.tree.map(lambda a: jnp.broadcast_to(a[:, None], (S, Q, *a.shape[1:])), states)
        start = jnp.zeros((S, Q), jnp.int32), states
        rounds = recorded.score.shape[1]
        shapes = jax.eval_shape(side_by_side, recorded, *start, costs)[0]
        empty = tuple(jnp.zeros((rounds, *a.shape), a.dtype) for a in shapes)

        def more(carry):
            (position, _), _, r = carry
            return (r < rounds) & jnp.any(position < recorded.length - 1)

        def step(carry):
            (position, states), history, r = carry
            seen, after = side_by_side(recorded, position, states, costs)
            history = tuple(all_.at[r].set(one) for all_, one in zip(history, seen))
            return after, history, r + 1

        _, history, count = lax.while_loop(more, step, (start, empty, jnp.int32(0)))
        return history, count

    return run


def one_round(rule: Policy, tree: TreeSpec, answer: Tape, position: Array, state: Any, costs: CostTable):
    """A round of one answer (no Q axis) with its root at `position`: fields of History, next position and state."""
    D = answer.frontier.shape[1]
    active = position < answer.length - 1
    at = jnp.minimum(position, answer.score.shape[0] - 1)
    score, depth, match, path, fronts, rank = (field[at] for field in answer[:6])
    plan = rule.plan(state, costs, active[None], cast(int, answer.context))
    levels = drafted_levels(rule, plan, fronts, score, depth, D)
    visible = jnp.where(depth <= levels, score, -jnp.inf)
    wanted = rule.budget(plan, visible[None], jnp.where(visible > -jnp.inf, depth, 0)[None])
    chosen = rank[levels] < jnp.minimum(wanted, tree.nodes) - 1
    taken = chosen & match
    accepted = jnp.max(jnp.where(taken, depth, 0), initial=0)
    nodes = chosen.sum(dtype=jnp.int32)
    counts = jnp.array(tree.row_counts())
    rows = counts[jnp.searchsorted(counts, 1 + nodes)]
    committed = jnp.minimum(accepted + 1, answer.length - 1 - position)
    first, steps, verify = parts(costs, answer.context, tree.width, levels, rows)
    info = RoundInfo(
        active=active[None],
        drafted_depth=jnp.max(jnp.where(chosen, depth, 0), initial=0)[None],
        drafted_nodes=nodes[None],
        verified_nodes=rows,
        num_accepted=accepted[None],
        num_committed=committed[None],
        levels=levels,
        score=jnp.where(chosen, score, -jnp.inf)[None],
        depth=jnp.where(chosen, depth, 0)[None],
        taken=taken[None],
        predicted_ms=first + steps + verify,
    )
    after = jax.tree.map(lambda new, old: jnp.where(active, new, old), rule.update(state, plan, info), state)
    expected = 1.0 + jnp.sum(jnp.where(chosen, path, 0.0))
    seen = (position, levels, nodes, rows, accepted, committed, expected, first, steps, verify)
    shown = tuple(jnp.where(active, value, jnp.zeros_like(value)) for value in seen)
    return (active, *shown), (jnp.where(active, position + committed, position), after)


def drafted_levels(
    rule: Policy, plan: Plan, fronts: Array, score: Array, depth: Array, D: int
) -> Int32[Array, ""]:
    """How many levels the policy drafts, asked before each as `tree.grow` asks."""
    levels = (plan.depth >= 1).astype(jnp.int32) * min(D, 1)
    going = levels == 1
    for d in range(1, D):
        seen = jnp.where(depth <= d, score, -jnp.inf)[None]
        front = fronts[d - 1]
        wanted = rule.extend(plan, front[None], jnp.int32(d), seen, jnp.where(seen > -jnp.inf, depth, 0))
        going &= wanted & (front > -jnp.inf).any()
        levels = jnp.where(going, d + 1, levels)
    return levels


def parts(costs: CostTable, context, width: int, levels, rows) -> tuple[Array, Array, Array]:
    """What `harness.costs.round_ms` adds up."""
    first = jnp.where(levels > 0, cost.at(costs.first, 1, context, 1), 0.0)
    steps = jnp.maximum(levels - 1, 0) * cost.at(costs.step, 1, context, width)
    return first, steps, cost.at(costs.verify, 1, context, rows)
