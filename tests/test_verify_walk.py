"""The real `verify` does what the exposed law says in every cell of the uniforms; nothing else shapes it."""

from functools import partial

import exact_law as ex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.types import Draft, Proposal
from eagle4.verify import VERIFIERS, walk
from eagle4.verify.point_mass import law as point_mass

K = 3
# One shape for all cases, so that each verifier compiles once.
DEPTH, ROWS, SLOTS = 3, 6000, 10


@partial(jax.jit, static_argnums=(0, 4, 5))
def verify(name, p, draft, uniforms, max_depth, max_children=K):
    return VERIFIERS[name].verify(p, draft, uniforms, max_depth, max_children)


def some_drafts(parents, kind, scheme, count, seed=0):
    """A random subset of all drafts, their p and their record."""
    tables = ex.make_tables(kind, 4, DEPTH, seed)
    drafts = ex.enumerate_drafts(parents, tables, scheme)
    rows = np.sort(np.random.default_rng(seed).permutation(len(drafts.weight))[:count])
    drafts = ex.Drafts(parents, *(x[rows] for x in drafts[1:]))
    return drafts, *ex.records(drafts, tables)


def points(low, high):
    """Three uniforms of a cell: just inside both ends, and the middle."""
    return low + 4e-6, 0.5 * (low + high), high - 4e-6


def expectations(drafts, outcome, accept_cells):
    """Rows (draft, path, token, uniforms): all cells of acceptance and of the final draw, at three places
    each.

    Uniforms that the walk has no business with are NaN.
    """
    rows = []
    for b, node in np.argwhere(outcome.stop > 1e-4):
        nodes = ex.path(drafts.parents, node)
        cdf = np.concatenate([[0.0], np.cumsum(outcome.emitted[b, node])])
        for token in np.flatnonzero(outcome.emitted[b, node] > 1e-4):
            for place in range(3):
                u = np.full((DEPTH + 1, 2), np.nan)
                u[len(nodes), 1] = points(cdf[token], cdf[token + 1])[place]
                for level, (low, high) in enumerate(accept_cells(b, nodes)):
                    u[level, 0] = points(low, high)[place]
                rows.append((b, nodes, token, u))
    return rows


def padded(p, draft, rows, number=np.nan, token=-7):
    """The given rows; dead nodes, and slots up to ten nodes, hold absurd values."""
    alive = draft.candidate | (np.arange(draft.candidate.shape[1]) == 0)
    more = SLOTS - alive.shape[1]

    def filled(x, fill):
        x = np.where(alive.reshape(alive.shape + (1,) * (x.ndim - 2)), x, np.asarray(fill, x.dtype))
        return np.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)[rows]

    return filled(p, number), Draft(
        tokens=filled(draft.tokens, token),
        parent=filled(draft.parent, -1),
        depth=filled(draft.depth, 0),
        attend=np.pad(draft.attend, ((0, 0), (0, more), (0, more)))[rows],
        candidate=filled(draft.candidate, False),
        score=filled(draft.score, number),
        q=Proposal(filled(draft.q.ids, token), filled(draft.q.probs, number)),
    )


def check_agreement(name, p, draft, rows):
    assert 6 <= len(rows) <= ROWS
    rows = (rows * ROWS)[:ROWS]
    uniforms = np.stack([u for *_, u in rows]).astype(np.float32)
    verdict = verify(name, *padded(p, draft, np.array([b for b, *_ in rows])), uniforms, DEPTH)
    path = np.array([[*nodes, *[-1] * (DEPTH - len(nodes))] for _, nodes, *_ in rows])
    np.testing.assert_array_equal(verdict.path, path)
    np.testing.assert_array_equal(verdict.num_accepted, [len(nodes) for _, nodes, *_ in rows])
    np.testing.assert_array_equal(verdict.next_token, [token for *_, token, _ in rows])


@pytest.mark.parametrize("kind", ["random", "sparse and filtered", "disjoint"])
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("point_mass", ex.repeated_picks),
        ("point_mass", ex.without_replacement),
        ("rejection", ex.without_replacement),
        ("multi_round", ex.independent),
        ("k_sequential", ex.independent),
    ],
)
def test_verify_agrees_with_its_law_in_every_cell(name, scheme, kind):
    drafts, p, draft = some_drafts(ex.UNEQUAL, kind, scheme, 40)
    outcome = ex.outcome_of_node_law(VERIFIERS[name].law, p, draft, drafts)
    take, _ = ex.node_laws(VERIFIERS[name].law, p, draft, drafts)
    kids = ex.kids_of(drafts, K).tolist()

    def accept_cells(b, nodes):
        for parent, child in zip([0, *nodes], nodes):
            k = kids[parent].index(child)
            yield take[b, parent, :k].sum(), take[b, parent, : k + 1].sum()
        last = nodes[-1] if nodes else 0
        if len(nodes) < DEPTH:
            yield take[b, last].sum(), 1.0

    check_agreement(name, p, draft, expectations(drafts, outcome, accept_cells))


@pytest.mark.parametrize("kind", ["random", "sparse and filtered", "disjoint"])
def test_block_verify_agrees_with_its_law_and_reads_one_acceptance_uniform(kind):
    drafts, p, draft = some_drafts(ex.CHAIN, kind, ex.independent, 40)
    outcome = ex.outcome_of_chain_law(VERIFIERS["block"].law, p, draft, drafts)

    def accept_cells(b, nodes):
        longer = outcome.stop[b, len(nodes) + 1 :].sum()
        yield longer, longer + outcome.stop[b, len(nodes)]

    check_agreement("block", p, draft, expectations(drafts, outcome, accept_cells))


def test_breakpoints_belong_to_the_cell_on_their_right():
    take = jnp.array([[0.25, 0.0, 0.5]])
    at = lambda u: int(walk.cell(take, jnp.array([u], jnp.float32))[0])  # noqa: E731
    below = lambda u: at(np.nextafter(np.float32(u), np.float32(0)))  # noqa: E731
    assert [at(0.0), below(0.25), at(0.25), below(0.75), at(0.75)] == [0, 0, 2, 2, 3]


def test_rounding_of_the_cumulative_sum_never_accepts_a_child_of_probability_zero(monkeypatch):
    """A parallel prefix sum may rise at an entry of zero; a uniform in that gap belongs to the next real
    child.
    """
    rounded = jnp.array([[0.25, 0.2501, 0.75]])
    monkeypatch.setattr(walk.jnp, "cumsum", lambda values, axis: rounded)
    assert walk.cell(jnp.array([[0.25, 0.0, 0.5]]), jnp.array([0.25005])).tolist() == [2]


def test_an_empty_residual_falls_back_to_p():
    p = jnp.array([[0.0, 0.4, 0.6]] * 2)
    residual = jnp.array([[0.0, 0.0, 0.0], [0.0, 1e-3, 0.0]])
    assert walk.draw_residual(residual, p, jnp.array([0.9, 0.9])).tolist() == [2, 1]


def tree(tokens, parents, q=None):
    """One row: the record of a tree written by hand."""
    size = len(parents)
    attend = [[m in (0, n, *ex.path(parents, n)) for m in range(size)] for n in range(size)]
    return Draft(
        tokens=jnp.array([tokens], jnp.int32),
        parent=jnp.array([parents], jnp.int32),
        depth=jnp.array([[len(ex.path(parents, n)) for n in range(size)]], jnp.int32),
        attend=jnp.array([attend]),
        candidate=jnp.array([[n > 0 for n in range(size)]]),
        score=jnp.zeros((1, size)),
        q=q,
    )


def verdict_of(name, p, draft, u, v=0.5, depth=1):
    """Path, next token for p [N, V] and the same two uniforms at each level."""
    uniforms = jnp.tile(jnp.array([u, v], jnp.float32), (1, depth + 1, 1))
    verdict = verify(name, jnp.array([p], jnp.float32), draft, uniforms, depth)
    return verdict.path[0, : int(verdict.num_accepted[0])].tolist(), int(verdict.next_token[0])


def test_golden_a4_greedy_takes_the_argmax_and_nothing_else():
    p = [[0.3, 0.5, 0.2], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]]
    assert verdict_of("greedy", p[:2], tree([9, 0], [-1, 0]), 0.0) == ([], 1)
    assert verdict_of("greedy", p, tree([9, 1, 0], [-1, 0, 0]), 0.0) == ([1], 2)
    assert verdict_of("greedy", p, tree([9, 0, 1], [-1, 0, 0]), 0.0) == ([2], 0)


def test_greedy_works_on_logits_and_breaks_ties_towards_the_lowest_id():
    logits = [[-30.0, -2.0, -2.0], [5.0, 90.0, 90.0], [0.0, 0.0, 0.0]]
    assert verdict_of("greedy", logits, tree([9, 2, 1], [-1, 0, 0]), 0.0) == ([2], 0)
    assert verdict_of("greedy", logits, tree([9, 1, 2], [-1, 0, 0]), 0.0) == ([1], 1)
    verdict = verify("greedy", jnp.array([logits]), tree([9, 1, 1], [-1, 0, 1]), None, 2)
    assert verdict.path.tolist() == [[1, 2]]
    assert verdict.next_token.tolist() == [0]


def test_golden_a5_zero_uniform_does_not_accept_a_token_of_probability_zero():
    q = Proposal(jnp.arange(3)[None, None].repeat(2, 1).astype(jnp.int32), jnp.full((1, 2, 3), 1 / 3))
    p = [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
    for name in ("point_mass", "rejection", "multi_round", "k_sequential", "block"):
        assert verdict_of(name, p, tree([9, 0], [-1, 0], q), 0.0, 0.1) == ([], 1)


def test_planted_u_less_or_equal_accepts_a_token_of_probability_zero(monkeypatch):
    planted = lambda take, u: walk.first_true(u[:, None] <= jnp.cumsum(take, axis=-1))  # noqa: E731
    monkeypatch.setattr(walk, "cell", planted)
    draft = tree([9, 0], [-1, 0])
    p = jnp.array([[[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]])
    verdict = jax.jit(lambda *args: VERIFIERS["point_mass"].verify(*args, 1, 1))(
        p, draft, jnp.zeros((1, 2, 2))
    )
    assert verdict.path.tolist() == [[1]]


@pytest.mark.parametrize("name", ["rejection", "multi_round", "k_sequential", "block"])
def test_golden_a7_equal_distributions_never_reject(name):
    p = np.array([0.3, 0.5, 0.2], np.float32)
    q = Proposal(jnp.arange(3)[None, None].repeat(2, 1).astype(jnp.int32), jnp.tile(p, (1, 2, 1)))
    last = np.nextafter(np.float32(1), np.float32(0))
    for token in range(3):
        got = verdict_of(name, [p, [0.0, 1.0, 0.0]], tree([9, token], [-1, 0], q), last, last)
        assert got == ([1], 1)


def test_golden_a7_children_that_cover_all_mass():
    """Whatever rounding leaves beyond the last child is drawn from p, never from nothing."""
    p = np.array([0.7, 0.2, 0.1, 0.0], np.float32)
    last = np.nextafter(np.float32(1), np.float32(0))
    draft = tree([9, 2, 1, 0], [-1, 0, 0, 0])
    path, token = verdict_of("point_mass", [p] * 4, draft, last, last)
    assert path in ([3], [])
    assert token == 2
    law = point_mass(p[None], jnp.array([[2, 1, 0]]), jnp.ones((1, 3), bool))
    np.testing.assert_array_equal(law.residual, 0)


@pytest.mark.parametrize("name", VERIFIERS)
def test_poison_in_unused_nodes_changes_nothing(name):
    """Slots without a node, and dead nodes inside the tree, hold NaN and absurd ids; or harmless zeros."""
    drafts, p, draft = some_drafts(ex.UNEQUAL, "sparse and filtered", ex.without_replacement, ROWS // 10)
    rng = np.random.default_rng(2)
    drafts.candidate[rng.random(len(p)) < 0.5, 3] = False
    uniforms = rng.random((ROWS, DEPTH + 1, 2)).astype(np.float32)
    rows = np.arange(ROWS) % len(p)
    expected = verify(name, *padded(p, draft, rows, number=0.0, token=0), uniforms, DEPTH)
    assert int(expected.num_accepted.max()) == DEPTH
    for token in (-7, 10**6):
        got = verify(name, *padded(p, draft, rows, number=np.nan, token=token), uniforms, DEPTH)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_lone_root_is_plain_decoding(name):
    p = [[0.2, 0.5, 0.3], [np.nan] * 3]
    q = Proposal(jnp.zeros((1, 2, 3), jnp.int32), jnp.zeros((1, 2, 3)))
    draft = tree([9, 0], [-1, 0], q).replace(
        parent=jnp.array([[-1, -1]], jnp.int32), candidate=jnp.zeros((1, 2), bool)
    )
    for v, token in ((0.1, 0), (0.21, 1), (0.69, 1), (0.71, 2)):
        assert verdict_of(name, p, draft, 0.0, v) == ([], 1 if name == "greedy" else token)


@pytest.mark.parametrize("name", ["point_mass", "block"])
def test_a_path_of_length_zero_has_no_path(name):
    q = Proposal(jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1, 3)))
    verdict = verify(name, jnp.array([[[0.2, 0.5, 0.3]]]), tree([9], [-1], q), jnp.full((1, 1, 2), 0.5), 0)
    assert verdict.path.shape == (1, 0)
    assert verdict.next_token.tolist() == [1]


def test_children_below_the_longest_path_do_not_shape_the_last_draw():
    p = [[1.0, 0.0, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    draft = tree([9, 0, 0], [-1, 0, 1])
    assert verdict_of("point_mass", p, draft, 0.9, 0.4, depth=1) == ([1], 0)
    assert verdict_of("point_mass", p, draft, 0.9, 0.4, depth=2) == ([1], 1)


@pytest.mark.parametrize("name", ["rejection", "multi_round", "k_sequential", "block"])
def test_verifiers_of_drawn_children_refuse_a_draft_without_proposal(name):
    with pytest.raises(BadInput, match="use 'point_mass'"):
        VERIFIERS[name].verify(jnp.ones((1, 2, 3)) / 3, tree([9, 0], [-1, 0]), jnp.zeros((1, 2, 2)), 1, 1)
