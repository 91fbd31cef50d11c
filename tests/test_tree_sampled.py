"""Trees of draws: the law of the draws, the bookkeeping of q, and shapes that no draw decides."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.specs import TreeSpec
from eagle4.tree import grow, sampled
from eagle4.types import Plan

STATES, BATCH, CAND = 31, 2, 5
ENVELOPE = TreeSpec("sampled", depth=3, width=3, children=2, nodes=16)
ROOTS = [3, 17]


def draw_in_order(uniforms: np.ndarray, probs: np.ndarray, count: int) -> list[int]:
    """Exponential race in float64: candidate i finishes at −log(u)/q; the first `count`, in order."""
    finish = [(-np.log(u) / q, i) for i, (u, q) in enumerate(zip(uniforms, probs)) if q > 0]
    slots = [i for _, i in sorted(finish)][:count]
    return slots + [-1] * (count - len(slots))


def test_draws_equal_the_exponential_race():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(8), (40, 3)).astype(np.float32)
    probs[rng.random(probs.shape) < 0.4] = 0
    uniforms = rng.uniform(1e-3, 1 - 1e-3, probs.shape).astype(np.float32)
    ids = np.arange(probs.size).reshape(probs.shape)
    ids = np.where(probs > 0, ids, -7).astype(np.int32)
    found, logq, slots = sampled.sample_children(
        jnp.asarray(uniforms), jnp.asarray(ids), jnp.asarray(probs), 4
    )
    for a, b in itertools.product(range(40), range(3)):
        expected = draw_in_order(uniforms[a, b].astype(float), probs[a, b].astype(float), 4)
        assert slots[a, b].tolist() == expected
        assert found[a, b].tolist() == [int(ids[a, b, s]) if s >= 0 else -1 for s in expected]
        wanted = [np.log(probs[a, b, s]) if s >= 0 else -np.inf for s in expected]
        np.testing.assert_allclose(logq[a, b], wanted, rtol=1e-5, atol=1e-6)


def test_order_of_draws_has_the_law_of_drawing_without_replacement():
    q = np.array([0.6, 0.3, 0.1])
    n = 48
    axis = (np.arange(n) + 0.5) / n
    grid = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(1, -1, 3)
    ids = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), grid.shape)
    found, _, _ = sampled.sample_children(
        jnp.asarray(grid), ids, jnp.broadcast_to(jnp.asarray(q), grid.shape), 2
    )
    found = np.asarray(found[0])
    for a, b in itertools.permutations(range(3), 2):
        share = ((found[:, 0] == a) & (found[:, 1] == b)).mean()
        assert share == pytest.approx(q[a] * q[b] / (1 - q[a]), abs=0.006)


def test_edge_uniforms_and_poisoned_empty_slots():
    probs = jnp.asarray([[[0.0, 0.5, 0.5, 0.0]]])
    ids = jnp.asarray([[[-5, 8, 9, 10**9]]], jnp.int32)
    for edge in (0.0, 1.0):
        found, logq, slots = sampled.sample_children(jnp.full((1, 1, 4), edge), ids, probs, 3)
        assert found.tolist() == [[[8, 9, -1]]]
        assert slots.tolist() == [[[1, 2, -1]]]
        np.testing.assert_allclose(logq[0, 0, :2], np.log(0.5), rtol=1e-6)
    with pytest.raises(BadInput, match=r"tree\.children is 5 but the drafter has only 4"):
        sampled.sample_children(jnp.zeros((1, 1, 4)), ids, probs, 5)


def toy_q() -> tuple[np.ndarray, np.ndarray]:
    """Candidates and q per state; every third state has one possible child only."""
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(40)[:CAND] for _ in range(STATES)]).astype(np.int32)
    probs = rng.dirichlet(np.ones(CAND), STATES).astype(np.float32)
    probs[::3] = np.eye(CAND, dtype=np.float32)[2]
    return ids, probs


Q_IDS, Q_PROBS = toy_q()


def follow(state, token):
    return (state * 5 + token + 1) % STATES


@jax.jit
def draft_sampled(uniforms, plan):
    ids, probs, root = jnp.asarray(Q_IDS), jnp.asarray(Q_PROBS), jnp.asarray(ROOTS, jnp.int32)

    def step(state, frontier):
        state = follow(jnp.take_along_axis(state, frontier.source, axis=1), frontier.tokens)
        hidden = ~frontier.valid[..., None]
        return jnp.where(hidden, -99, ids[state]), jnp.where(hidden, jnp.nan, probs[state]), state

    state = jnp.broadcast_to(root[:, None], (BATCH, ENVELOPE.width))
    draft, _ = sampled.sampled_draft(
        step, state, root, (ids[root], probs[root]), lambda depth: uniforms[depth], ENVELOPE, plan
    )
    return draft


def plan_of(depth: int, width: int, children: int, nodes: int) -> Plan:
    return Plan(*(jnp.int32(x) for x in (depth, width, children, nodes)))


def random_uniforms(seed: int) -> np.ndarray:
    shape = (ENVELOPE.depth, BATCH, ENVELOPE.width, CAND)
    return np.random.default_rng(seed).uniform(1e-3, 1 - 1e-3, shape).astype(np.float32)


def oracle(uniforms: np.ndarray, b: int, depth: int, width: int, children: int, nodes: int):
    """Nodes (token, parent, depth, state, expanded?), level by level; first draws are expanded first."""
    made = [[ROOTS[b], -1, 0, ROOTS[b], False]]
    frontier = [0]
    for level in range(1, depth + 1):
        by_rank: list[tuple[int, int, int]] = []
        for row, above in enumerate(frontier):
            made[above][4] = True
            state = made[above][3]
            slots = draw_in_order(uniforms[level - 1, b, row], Q_PROBS[state].astype(float), children)
            for rank, slot in enumerate(s for s in slots if s >= 0):
                token = int(Q_IDS[state][slot])
                by_rank.append((rank, row, len(made)))
                made.append([token, above, level, follow(state, token), False])
        frontier = [node for _, _, node in sorted(by_rank)[:width]]
    return made[:nodes]


@pytest.mark.parametrize("seed", range(6))
def test_sampled_tree_equals_the_oracle(seed: int):
    uniforms = random_uniforms(seed)
    for setting in [
        (3, 3, 2, 16),
        (3, 2, 2, 9),
        (3, 1, 1, 4),
        (2, 3, 2, 5),
        (1, 3, 2, 16),
        (0, 3, 2, 16),
        (3, 3, 1, 16),
    ]:
        draft = draft_sampled(jnp.asarray(uniforms), plan_of(*setting))
        assert draft.q is not None
        for b in range(BATCH):
            nodes = oracle(uniforms, b, *setting)
            count = 1 + int((np.asarray(draft.parent[b]) >= 0).sum())
            assert count == len(nodes)
            assert draft.tokens[b, :count].tolist() == [n[0] for n in nodes]
            assert draft.parent[b, :count].tolist() == [n[1] for n in nodes]
            assert draft.depth[b, :count].tolist() == [n[2] for n in nodes]
            for n, (_, _, _, state, expanded) in enumerate(nodes):
                if expanded:
                    np.testing.assert_array_equal(draft.q.ids[b, n], Q_IDS[state])
                    np.testing.assert_array_equal(draft.q.probs[b, n], Q_PROBS[state])
        np.testing.assert_allclose(draft.q.probs.sum(axis=2), 1, rtol=1e-6)
    assert draft_sampled._cache_size() == 1


def test_scores_are_log_path_probabilities_under_q():
    draft = draft_sampled(jnp.asarray(random_uniforms(0)), plan_of(3, 3, 2, 16))
    for b in range(BATCH):
        nodes = oracle(random_uniforms(0), b, 3, 3, 2, 16)
        for n, (token, above, *_) in enumerate(nodes[1:], start=1):
            state = nodes[above][3]
            prob = Q_PROBS[state][Q_IDS[state] == token].sum()
            assert draft.score[b, n] == pytest.approx(float(draft.score[b, above]) + np.log(prob), abs=1e-5)


def test_pruning_drawn_trees_never_looks_at_the_draw():
    full = draft_sampled(jnp.asarray(random_uniforms(1)), plan_of(3, 3, 2, 16))
    prune = jax.jit(grow.prune)
    for nodes in (1, 3, 8, 16):
        direct = draft_sampled(jnp.asarray(random_uniforms(1)), plan_of(3, 3, 2, nodes))
        pruned = prune(full, jnp.int32(nodes))
        for name in ("tokens", "parent", "depth", "attend", "candidate", "score"):
            np.testing.assert_array_equal(getattr(pruned, name), getattr(direct, name))
        kept = 1 + int(pruned.candidate[0].sum())
        np.testing.assert_array_equal(pruned.q.ids[0, :kept], full.q.ids[0, :kept])
        np.testing.assert_array_equal(grow.crop(pruned, 8).q.probs, pruned.q.probs[:, :8])


def test_shape_is_the_same_for_all_draws_when_every_q_is_wide():
    """Whatever is drawn, the tree has the same parents: no token's fate depends on its own draw."""
    root = jnp.asarray([1], jnp.int32)
    ids = jnp.arange(CAND, dtype=jnp.int32)

    def step(carry, frontier):
        skew = jax.nn.softmax(frontier.tokens[..., None] * jnp.arange(CAND, dtype=jnp.float32))
        return jnp.broadcast_to(ids, (1, 3, CAND)), skew, carry

    @jax.jit
    def shape(uniforms):
        first = (ids[None], jnp.full((1, CAND), 1 / CAND))
        plan = plan_of(3, 2, 2, 8)
        draft, _ = sampled.sampled_draft(step, None, root, first, lambda d: uniforms[d], ENVELOPE, plan)
        return draft.parent[0], draft.tokens[0]

    drawn = [shape(jnp.asarray(random_uniforms(seed)[:, :1])) for seed in range(12)]
    assert len({tuple(parent.tolist()) for parent, _ in drawn}) == 1
    assert len({tuple(tokens.tolist()) for _, tokens in drawn}) > 8
    assert drawn[0][0].tolist()[:9] == [-1, 0, 0, 1, 1, 2, 2, 3, -1]
