"""A recording replayed is decoding itself: every decision and token, under every policy; and the oracle bounds all."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from kit import fitted_eagle_params, plain_greedy, prompts, run, tiny_params

from eagle4.decode import Params
from eagle4.drafters.eagle_net import complete
from eagle4.errors import BadInput
from eagle4.harness import costs
from eagle4.methods import Method
from eagle4.oracle import best_walk
from eagle4.policy_spec import PolicySpec
from eagle4.record import Request, largest, record
from eagle4.recording import About, Recorded, Trees, Variant, matches, read, start, write_group
from eagle4.replay import at_batch, frontier, paths, ranked, tape, walk
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, SamplingSpec, System, TreeSpec

MODEL = ModelSpec("llama", 16, 16, 24, 2, 2, 1, 8, 256)
EAGLE = complete(EagleSpec(taps=(0, 2), fc_norm=True, norm_output=True, draft_vocab=16), MODEL)
WEIGHTS = tiny_params(MODEL, 1)
DRAFTER = DrafterSpec("eagle", eagle=EAGLE)
NEW, DEPTH, CAPACITY = 32, 4, 192
SHAPES = [Variant("own", 1, 1), Variant("own", 2, 2), Variant("own", 3, 3)]
STOPS = (7,)


def table(first=1.0, step=1.5, verify=(10, 10.5, 12, 13, 15, 16)):
    """Milliseconds that make some guesses pay and some not."""
    sizes = [1, 2, 3, 4, 6, 8]
    grids = [
        costs.grid(
            [1, 64], [64, 512], sizes, [[[v * c * b for v in verify] for c in (1, 1.1)] for b in (1, 3)]
        )
    ]
    grids += [costs.grid([1, 64], [64], [1], [[[first]], [[first * 2]]])]
    grids += [costs.grid([1, 64], [64], [1, 3], [[[step, step * 1.2]], [[step * 2, step * 3]]])]
    return costs.CostTable(*grids)


def method(temperature=0.0):
    sampling = SamplingSpec(temperature=temperature)
    verifier = "greedy" if sampling.greedy else "point_mass"
    system = System(MODEL, DRAFTER, verifier=verifier, sampling=sampling, taps=EAGLE.taps)
    return Method(
        "m", system, PolicySpec(), Params(WEIGHTS, fitted_eagle_params(EAGLE, MODEL, seed=3, target_seed=1))
    )


ASKED = [Request(f"p{i}", "any", ids, i) for i, ids in enumerate(prompts((9, 30, 61), vocab=16))]


@pytest.fixture(scope="module")
def answers():
    methods = {v: largest(method(), v, DEPTH) for v in SHAPES}
    return record(methods, ASKED, NEW, CAPACITY, STOPS, probs=["own"])


def test_recorded_answers_are_plain_decodings(answers):
    for asked, answer in zip(ASKED, answers):
        said = plain_greedy(WEIGHTS, MODEL, asked.ids, NEW + DEPTH)
        length = said.index(7) + 1 if 7 in said[:NEW] else NEW
        assert answer.length == length
        assert answer.tokens.tolist() == said[: length + DEPTH]
        assert len(answer.entropy) == length - 1


SETTINGS = [
    (Variant("own", 2, 2), TreeSpec("dynamic", 3, 2, 2, 6, buckets=(1, 2, 3, 4)), PolicySpec()),
    pytest.param(
        Variant("own", 3, 3),
        TreeSpec("dynamic", 4, 3, 3, 8),
        PolicySpec(depth=2, nodes=5),
        marks=pytest.mark.slow,
    ),
    pytest.param(Variant("own", 1, 1), TreeSpec("chain", 4, 1, 1, 5), PolicySpec(), marks=pytest.mark.slow),
    pytest.param(
        Variant("own", 2, 2),
        TreeSpec("dynamic", 4, 3, 3, 8),
        PolicySpec(width=2, children=2),
        marks=pytest.mark.slow,
    ),
    (Variant("own", 3, 3), TreeSpec("dynamic", 4, 3, 3, 8), PolicySpec("confidence", threshold=0.15)),
    (Variant("own", 3, 3), TreeSpec("dynamic", 4, 3, 3, 8, buckets=(1, 2, 3, 4, 6)), PolicySpec("marginal")),
    pytest.param(
        Variant("own", 2, 2),
        TreeSpec("dynamic", 4, 2, 2, 8),
        PolicySpec("marginal", tau=0.6, rise=0.2),
        marks=pytest.mark.slow,
    ),
    (Variant("own", 3, 3), TreeSpec("dynamic", 2, 3, 3, 8), PolicySpec("marginal", online=False, forget=0.8)),
]


@pytest.mark.parametrize(("variant", "tree", "policy"), SETTINGS)
def test_a_replay_is_the_decode_itself(answers, variant, tree, policy):
    base, priced = method(), table()
    system = replace(base.system, tree=tree, policy=policy.name)
    context = [CAPACITY] * len(answers)
    history = walk(tape(answers, variant.name, tree.depth, tree.width, context), tree, [policy], priced)
    for q, asked in enumerate(ASKED):
        params = base.params._replace(costs=priced)
        ids, _, rounds = run(
            system,
            params,
            [asked.ids],
            NEW,
            seeds=[asked.seed],
            capacity=CAPACITY,
            policy=policy,
            stop_ids=STOPS,
        )
        assert ids[0] == answers[q].tokens[: answers[q].length].tolist()
        seen = history.active[:, 0, q]
        assert seen.sum() == len(rounds.levels)
        for ours, theirs in (
            ("levels", rounds.levels),
            ("nodes", rounds.drafted_nodes[:, 0]),
            ("rows", rounds.verified_nodes),
            ("accepted", rounds.num_accepted[:, 0]),
            ("committed", rounds.num_committed[:, 0]),
        ):
            np.testing.assert_array_equal(getattr(history, ours)[seen, 0, q], theirs, err_msg=ours)
        total = history.first_ms + history.steps_ms + history.verify_ms
        np.testing.assert_allclose(total[seen, 0, q], rounds.predicted_ms, rtol=1e-6)


def test_the_recorded_drafter_is_right_often_enough_for_a_comparison_to_mean_something(answers):
    found = [a.trees["own_w3k3"].match.any(1).mean() for a in answers]
    assert min(found) > 0.1
    assert sum((a.trees["own_w3k3"].match & (a.trees["own_w3k3"].depth > 1)).any() for a in answers)


def test_settings_side_by_side_are_each_alone(answers):
    tree = TreeSpec("dynamic", 4, 3, 3, 8)
    recorded = tape(answers, "own_w3k3", 4, 3, [CAPACITY] * 3)
    policies = [PolicySpec("marginal", tau=t) for t in (0.5, 1.0, 2.0)]
    together = walk(recorded, tree, policies, table())
    assert len({tuple(together.rows[:, s].ravel()) for s in range(3)}) == 3
    for s, policy in enumerate(policies):
        alone = walk(recorded, tree, [policy], table())
        for field in alone._fields:
            whole = getattr(together, field)[:, s]
            np.testing.assert_array_equal(whole[: len(alone.active)], getattr(alone, field)[:, 0])
            assert not whole[len(alone.active) :].any()


def test_many_copies_cost_what_the_table_says_of_their_number(answers):
    tree = TreeSpec("dynamic", 2, 3, 3, 8)
    recorded = tape(answers, "own_w3k3", 2, 3, [CAPACITY] * 3)
    one, many = (walk(recorded, tree, [PolicySpec()], table(), batch) for batch in (1, 22))
    np.testing.assert_array_equal(one.rows, many.rows)
    row, n = one.rows[0, 0, 0], one.active.sum()
    wanted = costs.at(table().verify, 22, CAPACITY, row)
    np.testing.assert_allclose(many.verify_ms[0, 0, 0], wanted, rtol=1e-5)
    np.testing.assert_allclose(at_batch(table(), 22).first.ms, [[[1 + 21 / 63]]], rtol=1e-5)
    assert many.verify_ms.sum() > one.verify_ms.sum() > 10 * n


# --- the oracle ---


def exhaustive(answer: Recorded, variant: str, tree: TreeSpec, priced) -> float:
    """Least total milliseconds over every choice of levels and nodes in every round, by trying all."""
    trees, memo = answer.trees[variant], {}

    def least(i: int) -> float:
        if i >= answer.length - 1:
            return 0.0
        if i not in memo:
            options = []
            for levels in range(tree.depth + 1):
                inside = [
                    m
                    for m in range(len(trees.depth[i]))
                    if trees.score[i][m] > -np.inf and trees.depth[i][m] <= levels
                ]
                inside.sort(key=lambda m: -trees.score[i][m])
                for n in range(tree.nodes):
                    chosen = inside[:n]
                    accepted = max((int(trees.depth[i][m]) for m in chosen if trees.match[i][m]), default=0)
                    rows = min(r for r in tree.row_counts() if r >= 1 + len(chosen))
                    cost = float(costs.round_ms(priced, 1, CAPACITY, tree.width, levels, rows))
                    options.append(cost + least(i + accepted + 1))
            memo[i] = min(options)
        return memo[i]

    return least(0)


def test_the_oracle_is_the_least_of_all_choices_and_no_policy_beats_it(answers):
    tree, priced = TreeSpec("dynamic", 3, 2, 2, 6, buckets=(1, 3)), table()
    recorded = tape(answers, "own_w2k2", 3, 2, [CAPACITY] * 3)
    found = best_walk(recorded, tree, priced)
    wanted = [exhaustive(a._replace(length=min(a.length, 8)), "own_w2k2", tree, priced) for a in answers]
    short = tape([a._replace(length=min(a.length, 8)) for a in answers], "own_w2k2", 3, 2, [CAPACITY] * 3)
    np.testing.assert_allclose(best_walk(short, tree, priced).ms, wanted, rtol=1e-5)
    for policy in (PolicySpec(), PolicySpec("marginal"), PolicySpec("confidence", threshold=0.3)):
        history = walk(recorded, tree, [policy], priced)
        total = (history.first_ms + history.steps_ms + history.verify_ms).sum((0, 1))
        assert (total >= found.ms * (1 - 1e-6)).all()


# --- the pieces, by hand ---


def test_nodes_match_only_along_what_was_said():
    # root → 5, 6; 5 → 8, 9; 6 → 8; 9 → 1
    tokens, parent = np.array([5, 6, 8, 9, 8, 1]), np.array([-1, -1, 0, 0, 1, 3])
    depth = np.array([1, 1, 2, 2, 2, 3])
    assert matches(tokens, parent, depth, [5, 9, 1]).tolist() == [True, False, False, True, False, True]
    assert matches(tokens, parent, depth, [6, 8]).tolist() == [False, True, False, False, True, False]
    assert matches(tokens, parent, depth, []).tolist() == [False] * 6


def test_ranks_frontiers_and_paths_by_hand():
    score = np.array([[-1.0, -np.inf, -0.5, -1.0]], np.float32)
    assert ranked(score).tolist() == [[1, 4, 0, 2]]
    np.testing.assert_array_equal(frontier(score, 2), [[-0.5, -1.0]])
    np.testing.assert_array_equal(frontier(score, 6), [[-0.5, -1, -1, -np.inf, -np.inf, -np.inf]])
    parent, prob = np.array([[-1, 0, 1, -1]]), np.array([[0.5, 0.5, 0.2, 0.3]])
    np.testing.assert_allclose(paths(parent, prob), [[0.5, 0.25, 0.05, 0.3]])


def test_expected_tokens_are_what_draws_give_on_average():
    """At temperature 1: Σ over rounds of expected and of real acceptance agree over many drawn answers."""
    asked = [Request(f"d{i}", "any", ASKED[0].ids, 1000 + i) for i in range(48)]
    shape = Variant("own", 3, 3)
    drawn = record({shape: largest(method(1.0), shape, 2)}, asked, NEW, CAPACITY, (), probs=["own"])
    tree = TreeSpec("dynamic", 2, 3, 3, 8)
    history = walk(tape(drawn, shape.name, 2, 3, [CAPACITY] * 48), tree, [PolicySpec()], table())
    inside = history.active & (history.position < NEW - 3)  # the last rounds are cropped
    real, expected = (1 + history.accepted)[inside].astype(float), history.expected[inside]
    error = (real - expected).std() / np.sqrt(inside.sum())
    assert abs(real.mean() - expected.mean()) < 4 * error
    assert expected.mean() > 1.1


# --- files ---


ABOUT = About({"target": "t"}, DEPTH, NEW, tuple(SHAPES), "the command")


def test_a_recording_comes_back_from_disk_as_it_was(answers, tmp_path):
    assert start(tmp_path, ABOUT) == set()
    write_group(tmp_path, answers[:2])
    assert start(tmp_path, ABOUT) == {"p0", "p1"}
    write_group(tmp_path, answers[2:])
    there, back = read(tmp_path)
    assert there == ABOUT
    for ours, theirs in zip(answers, back, strict=True):
        assert ours[:4] == theirs[:4]
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        for name, trees in ours.trees.items():
            real = np.isfinite(trees.score)
            for field in Trees._fields:
                a, b = (np.asarray(getattr(t, field)) for t in (trees, theirs.trees[name]))
                np.testing.assert_array_equal(a[real], b[real], err_msg=field)
            np.testing.assert_array_equal(real, np.isfinite(theirs.trees[name].score))


def test_another_recording_s_folder_and_damaged_files_are_refused(answers, tmp_path):
    start(tmp_path, ABOUT)
    write_group(tmp_path, answers)
    with pytest.raises(BadInput, match="another identity"):
        start(tmp_path, ABOUT._replace(identity={"target": "other"}))
    with pytest.raises(BadInput, match="another depth, variants"):
        start(tmp_path, ABOUT._replace(depth=2, variants=()))
    part = next(tmp_path.glob("trees_*"))
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"trees_00000.parquet is cut or damaged"):
        read(tmp_path)
    (tmp_path / "recording.json").write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        read(tmp_path)
    with pytest.raises(BadInput, match="not a recording"):
        read(tmp_path / "nowhere")


def test_a_tree_too_large_to_verify_is_refused():
    with pytest.raises(BadInput, match="more than 256"):
        largest(method(), Variant("own", 16, 16), 4)


def test_prices_are_those_of_the_copies_table():
    assert at_batch(table(), 1).verify.ms.shape[0] == 1
    assert jnp.allclose(at_batch(table(), 64).verify.ms[0], table().verify.ms[1])
