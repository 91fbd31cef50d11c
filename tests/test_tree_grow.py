"""Growth under jit against plain-Python oracles, on a toy drafter whose answers depend on the whole path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.specs import TreeSpec
from eagle4.tree import grow, presets, topology
from eagle4.tree.static import static_draft
from eagle4.types import Draft, Plan

STATES, VOCAB, BATCH = 61, 50, 3
ENVELOPE = TreeSpec("dynamic", depth=5, width=4, children=3, nodes=20)
ROOTS = [7, 11, 20]


def toy_tables(children: int) -> tuple[np.ndarray, np.ndarray]:
    """Children ids and log probabilities per state: quarters make ties, 0 makes a child tie its parent."""
    rng = np.random.default_rng(5)
    ids = np.stack([rng.permutation(VOCAB)[:children] for _ in range(STATES)]).astype(np.int32)
    logps = -np.sort(rng.integers(0, 9, (STATES, children)), axis=1).astype(np.float32) / 4
    logps[rng.random(STATES) < 0.15, 1:] = -np.inf
    return ids, logps


def follow(state, token):
    return (state * 7 + token + 3) % STATES


def toy_step(ids: jax.Array, logps: jax.Array):
    """A drafter with a recurrent state and tree rows; it counts its calls and where the two disagree.

    Each tree row keeps its token; what a node sees through `attend` must be the path its state has followed.
    """

    def step(carry, frontier):
        state, path_sum, rows, calls, wrong = carry
        width = frontier.tokens.shape[1]
        state, path_sum = (jnp.take_along_axis(x, frontier.source, axis=1) for x in (state, path_sum))
        weight = frontier.depth * 100 + 1
        state, path_sum = follow(state, frontier.tokens), path_sum + weight * frontier.tokens
        row = (frontier.depth - 1) * width
        rows = jax.lax.dynamic_update_slice_in_dim(rows, weight * frontier.tokens, row, axis=1)
        visible = (frontier.attend * rows[:, None]).sum(2)
        count = frontier.attend.sum(2)
        bad = frontier.valid & ((visible != path_sum) | (count != frontier.depth))
        bad |= ~frontier.valid & (count != 1)
        poison = ~frontier.valid[..., None]
        child_ids = jnp.where(poison, -(10**6), ids[state])
        child_logps = jnp.where(poison, jnp.nan, logps[state])
        return child_ids, child_logps, (state, path_sum, rows, calls + 1, wrong + bad.sum())

    return step


def start_state(width: int, depth: int):
    state = jnp.broadcast_to(jnp.asarray(ROOTS, jnp.int32)[:, None], (BATCH, width))
    zero = jnp.zeros((BATCH, width), jnp.int32)
    return state, zero, jnp.zeros((BATCH, depth * width), jnp.int32), jnp.int32(0), jnp.int32(0)


def plan_of(depth: int, width: int, children: int, nodes: int) -> Plan:
    return Plan(*(jnp.int32(x) for x in (depth, width, children, nodes)))


TABLES = toy_tables(ENVELOPE.children)


@jax.jit
def draft_dynamic(plan: Plan):
    ids, logps = (jnp.asarray(t) for t in TABLES)
    root = jnp.asarray(ROOTS, jnp.int32)
    carry = start_state(ENVELOPE.width, ENVELOPE.depth)
    pool, carry = grow.grow(toy_step(ids, logps), carry, (ids[root], logps[root]), ENVELOPE, plan)
    return grow.rerank(pool, root, plan.nodes, ENVELOPE), carry[3], carry[4]


def oracle(root: int, depth: int, width: int, children: int, nodes: int) -> list[tuple[int, int, int, float]]:
    """EAGLE-2 with lists and sorts: (token, parent, depth, score) per node, root first, creation order."""
    ids, logps = TABLES
    pool: list[tuple[int, int, int, float]] = []
    state_of = {-1: root}
    frontier = [(-1, np.float32(0))]
    for level in range(1, depth + 1):
        made = []
        for above, score in frontier:
            state = state_of[above]
            for token, logp in list(zip(ids[state], logps[state]))[:children]:
                if logp > -np.inf:
                    state_of[len(pool)] = follow(state, int(token))
                    made.append((len(pool), score + logp))
                    pool.append((int(token), above, level, float(score + logp)))
        frontier = sorted(made, key=lambda pair: (-pair[1], pair[0]))[:width]
    best = sorted(range(len(pool)), key=lambda i: (-pool[i][3], i))[: nodes - 1]
    kept = sorted(best)
    node = {-1: 0} | {i: n for n, i in enumerate(kept, start=1)}
    assert all(pool[i][1] in node for i in kept)
    return [(root, -1, 0, 0.0)] + [(pool[i][0], node[pool[i][1]], pool[i][2], pool[i][3]) for i in kept]


def rows_of(draft: Draft, b: int) -> list[tuple[int, int, int, float]]:
    count = 1 + int((np.asarray(draft.parent[b]) >= 0).sum())
    fields = (draft.tokens, draft.parent, draft.depth, draft.score)
    return [tuple(np.asarray(f[b])[n].item() for f in fields) for n in range(count)]


def settings() -> list[tuple[int, int, int, int]]:
    rng = np.random.default_rng(1)
    some = [tuple(int(rng.integers(1, top + 1)) for top in (5, 4, 3, 20)) for _ in range(40)]
    return [(5, 4, 3, 20), (1, 1, 1, 1), (5, 1, 1, 6), (0, 4, 3, 20), (1, 4, 3, 20), (5, 4, 3, 1), *some]


def test_dynamic_tree_equals_the_oracle_in_one_compiled_program():
    for setting in settings():
        draft, calls, wrong = draft_dynamic(plan_of(*setting))
        for b, root in enumerate(ROOTS):
            assert rows_of(draft, b) == oracle(root, *setting), (setting, b)
        assert int(wrong) == 0
        assert int(calls) <= max(setting[0] - 1, 0)
    assert draft_dynamic._cache_size() == 1


def test_toy_has_ties_everywhere():
    scores = [node[3] for node in oracle(ROOTS[0], 5, 4, 3, 20)]
    assert len(set(scores)) < len(scores)


def test_record_is_consistent():
    draft, calls, _ = draft_dynamic(plan_of(3, 2, 2, 6))
    assert int(calls) == 2
    live = np.asarray(draft.parent) >= 0
    np.testing.assert_array_equal(draft.candidate, live)
    np.testing.assert_array_equal(draft.attend, topology.ancestors(draft.parent))
    np.testing.assert_array_equal(draft.depth, topology.depths(draft.parent))
    assert draft.q is None
    assert not np.asarray(draft.tokens)[:, 1:][~live[:, 1:]].any()
    assert (np.asarray(draft.score)[:, 1:][~live[:, 1:]] == -np.inf).all()


def test_levels_that_the_policy_declines_are_not_computed():
    ids, logps = (jnp.asarray(t) for t in TABLES)
    root = jnp.asarray(ROOTS, jnp.int32)
    seen = []

    @jax.jit
    def run(threshold):
        def extend(plan, scores, depth, drafted, depths):
            seen.append((scores.shape, depth.shape))
            return (depth < plan.depth) & (depth < threshold)

        carry = start_state(ENVELOPE.width, ENVELOPE.depth)
        children = (ids[root], logps[root])
        pool, carry = grow.grow(toy_step(ids, logps), carry, children, ENVELOPE, plan_of(5, 4, 3, 20), extend)
        return pool.depth.max(), carry[3]

    for threshold in (1, 2, 4, 9):
        depth, calls = run(jnp.int32(threshold))
        assert int(depth) == min(threshold, 5)
        assert int(calls) == min(threshold, 5) - 1
    assert seen[0] == ((BATCH, 4), ())


def test_wrong_number_of_root_children_is_refused():
    short = (jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2)))
    with pytest.raises(BadInput, match=r"gives 2 root children, tree\.children is 3"):
        grow.grow(lambda c, f: (None, None, c), None, short, ENVELOPE, plan_of(1, 1, 1, 2))


def test_scores_above_zero_cannot_lift_a_child_over_its_parent():
    envelope = TreeSpec("dynamic", depth=2, width=1, children=1, nodes=2)
    one = (jnp.ones((1, 1), jnp.int32), jnp.full((1, 1), -1.0))

    def step(carry, frontier):
        return jnp.full((1, 1, 1), 2), jnp.full((1, 1, 1), 5.0), carry

    @jax.jit
    def run(plan):
        pool, _ = grow.grow(step, None, one, envelope, plan)
        return pool, grow.rerank(pool, jnp.zeros(1, jnp.int32), plan.nodes, envelope)

    pool, draft = run(plan_of(2, 1, 1, 2))
    assert draft.tokens[0].tolist() == [0, 1]
    assert pool.score[0].tolist() == [-1.0, -1.0]


def test_pruning_a_draft_equals_reranking_its_pool():
    full, _, _ = draft_dynamic(plan_of(5, 4, 3, 20))
    prune = jax.jit(grow.prune)
    for nodes in (1, 2, 5, 13, 20):
        direct, _, _ = draft_dynamic(plan_of(5, 4, 3, nodes))
        jax.tree.map(np.testing.assert_array_equal, prune(full, jnp.int32(nodes)), direct)
    small = grow.crop(draft_dynamic(plan_of(5, 4, 3, 5))[0], 5)
    assert small.attend.shape == (BATCH, 5, 5)
    assert rows_of(small, 1) == rows_of(full, 1)[:1] + oracle(ROOTS[1], 5, 4, 3, 5)[1:]


def test_gains_are_the_path_probabilities_in_falling_order():
    draft, _, _ = draft_dynamic(plan_of(2, 2, 2, 6))
    for b, root in enumerate(ROOTS):
        probs = sorted((np.exp(node[3]) for node in oracle(root, 2, 2, 2, 6)), reverse=True)
        found = np.asarray(grow.gains(draft)[b])
        np.testing.assert_allclose(found[: len(probs)], probs, rtol=1e-6)
        assert (found[len(probs) :] == 0).all()


def static_oracle(root: int, paths) -> list[int]:
    ids, _ = toy_tables(4)
    tokens = []
    for path in [(), *sorted(paths, key=lambda p: (len(p), p))]:
        token, state = root, root
        for rank in path:
            token = int(ids[state][rank])
            state = follow(state, token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("paths", [presets.EAGLE_25, ((0,), (1,), (1, 0)), ((0,),), ()])
def test_static_tree_takes_the_child_of_each_rank(paths):
    shape = presets.from_rank_paths(paths)
    ids, logps = toy_tables(4)
    ids = jnp.asarray(ids[:, : shape.max_children])
    logps = jnp.asarray(np.where(np.isinf(logps), -9.0, logps)[:, : shape.max_children])
    root = jnp.asarray(ROOTS, jnp.int32)

    @jax.jit
    def run(plan):
        carry = start_state(shape.width, shape.max_depth)
        draft, carry = static_draft(toy_step(ids, logps), carry, root, (ids[root], logps[root]), shape, plan)
        return draft, carry[3], carry[4]

    full = len(shape.parent)
    draft, calls, wrong = run(plan_of(shape.max_depth, 1, 1, full))
    assert int(calls) == max(shape.max_depth - 1, 0)
    assert int(wrong) == 0
    for b, start in enumerate(ROOTS):
        assert draft.parent[b].tolist() == list(shape.parent)
        assert draft.depth[b].tolist() == list(shape.depth)
        assert draft.tokens[b].tolist() == static_oracle(start, paths)
    if shape.max_depth > 1:
        shallow, calls, _ = run(plan_of(1, 1, 1, full))
        assert int(calls) == 0
        assert int(shallow.candidate[0].sum()) == shape.nodes_at_depth()[1]
        pruned, _, _ = run(plan_of(shape.max_depth, 1, 1, 3))
        jax.tree.map(np.testing.assert_array_equal, pruned, jax.jit(grow.prune)(draft, jnp.int32(3)))
    assert run._cache_size() == 1


@pytest.mark.parametrize("missing", [-np.inf, np.nan])
def test_static_tree_drops_only_what_hangs_on_a_missing_child(missing: float):
    shape = presets.from_rank_paths([(0,), (1,), (0, 0), (1, 0)])
    root_children = (jnp.asarray([[4, 5]]), jnp.asarray([[-1.0, missing]]))

    def step(carry, frontier):
        return jnp.full((1, 2, 2), 9), jnp.full((1, 2, 2), -1.0), carry

    draft, _ = static_draft(step, None, jnp.zeros(1, jnp.int32), root_children, shape, plan_of(2, 2, 2, 5))
    assert draft.tokens[0].tolist() == [0, 4, 9, 0, 0]
    assert draft.parent[0].tolist() == [-1, 0, 1, -1, -1]


def test_nan_and_minus_infinity_mean_no_child():
    envelope = TreeSpec("dynamic", depth=1, width=1, children=3, nodes=4)
    answers = (jnp.asarray([[4, 5, 6]]), jnp.asarray([[np.nan, -1.0, -np.inf]]))
    run = jax.jit(lambda plan: grow.grow(lambda c, f: (*answers, c), None, answers, envelope, plan)[0])
    pool = run(plan_of(1, 1, 3, 4))
    assert pool.score[0].tolist() == [-np.inf, -1.0, -np.inf]
    assert pool.tokens[0].tolist() == [0, 5, 0]
