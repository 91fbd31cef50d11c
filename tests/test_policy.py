"""What the policies decide, against rules computed by hand, and the sanity of pricing (law 9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.harness import costs, marginal
from eagle4.harness import reliability as trust
from eagle4.harness.policies import POLICIES
from eagle4.policy_spec import PolicySpec, ReliabilitySpec
from eagle4.specs import TreeSpec
from eagle4.types import RoundInfo

TREE = TreeSpec("dynamic", depth=4, width=2, children=2, nodes=8, buckets=(1, 2, 4, 8))
BOTH = jnp.array([True, True])
# One program each for all the draws they are tried on.
budget, extend = jax.jit(marginal.budget), jax.jit(marginal.extend)


@pytest.fixture(scope="module", autouse=True)
def forget_single_operations():
    """Thousands of operations one by one fill JAX's cache of programs; other tests count their own entries in it."""
    yield
    jax.clear_caches()


def table(verify=(10, 11, 12, 16), step=1.0, first=1.0, batch_cost=0.0):
    sizes = [1, 2, 4, 8]
    ms = [[[v + batch_cost * (b - 1) * n for n, v in zip(sizes, verify)]] for b in (1, 8)]
    flat = costs.grid([1], [1], [1], [[[first]]]), costs.grid([1], [1], [1], [[[step]]])
    return costs.CostTable(costs.grid([1, 8], [64], sizes, ms), *flat)


MARGINAL = PolicySpec("marginal")


def planned(spec=MARGINAL, tree=TREE, costs=None, active=BOTH, change=lambda s: s):
    policy = POLICIES[spec.name](spec, tree)
    state = change(policy.init())
    return policy, state, policy.plan(state, costs or table(), active, 64)


def logs(*rows):
    with np.errstate(divide="ignore"):
        return jnp.array(np.log(np.array(rows, np.float32)))


def info(accepted, score, depth, taken, levels=2, predicted=10.0, active=BOTH):
    accepted = jnp.array(accepted, jnp.int32)
    return RoundInfo(
        active=active,
        drafted_depth=jnp.max(jnp.array(depth), axis=1),
        drafted_nodes=jnp.ones_like(accepted),
        verified_nodes=jnp.int32(4),
        num_accepted=accepted,
        num_committed=accepted + 1,
        levels=jnp.int32(levels),
        score=logs(*score),
        depth=jnp.array(depth),
        taken=jnp.array(taken),
        predicted_ms=jnp.float32(predicted),
    )


# --- marginal: how many nodes ---


def best_budget(scores, active, tau, verify, most):
    """The definition, by trying all."""
    values = []
    for n in range(1, most + 1):
        gain = np.mean([np.sort(row)[::-1][: n - 1].sum() for row, live in zip(scores, active) if live])
        values.append(gain - tau * verify[n - 1])
    return 1 + int(np.argmax(values))


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 6.0])
@pytest.mark.parametrize("active", [(True, True), (True, False)])
def test_the_budget_maximises_tokens_less_their_price(tau, active):
    rng = np.random.default_rng(0)
    stairs = np.array([10, 11, 12, 12, 16, 16, 16, 16]) / 10
    chosen = set()
    for _ in range(40):
        scores = np.sort(rng.uniform(0, 1, (2, 10)) ** rng.uniform(0.3, 4), axis=1).astype(np.float32)
        _, _, plan = planned(PolicySpec("marginal", tau=tau), active=jnp.array(active))
        found = int(budget(plan, logs(*scores), jnp.ones((2, 10), jnp.int32)))
        assert found == best_budget(scores, active, tau, stairs, 8)
        chosen.add(found)
    assert len(chosen) > 1 or tau in (0.5, 6.0)


def test_verifying_is_priced_by_the_row_counts_that_are_compiled():
    _, _, plan = planned()
    np.testing.assert_allclose(plan.price.verify, np.array([10, 11, 12, 12, 16, 16, 16, 16]) / 10, rtol=1e-6)
    assert float(plan.price.step) == pytest.approx(0.1)


def test_flat_costs_verify_everything_and_steep_ones_nothing():
    scores, depth = logs([0.5] * 10, [0.5] * 10), jnp.ones((2, 10), jnp.int32)
    policy, _, plan = planned(costs=table((10, 10, 10, 10)))
    assert int(policy.budget(plan, scores, depth)) == 8
    policy, _, plan = planned(costs=table((10, 100, 200, 400)))
    assert int(policy.budget(plan, scores, depth)) == 1


def test_the_plan_bounds_the_budget():
    policy, _, plan = planned(PolicySpec("marginal", nodes=3), costs=table((10, 10, 10, 10)))
    assert int(policy.budget(plan, logs([0.5] * 10, [0.5] * 10), jnp.ones((2, 10), jnp.int32))) == 3


# --- marginal: one level more ---


def objective(rates, active, bar, verify):
    """The most of E[A] − τ·V(n), by trying all n."""
    rows = [np.sort(row)[::-1] for row, live in zip(rates, active) if live]
    return max(np.mean([row[: n - 1].sum() for row in rows]) - bar * verify[n - 1] for n in range(1, 9))


def pays(drafted, frontier, depth, reach, tau, step, verify, rise=0.0, most=4, active=(True, True)):
    """By definition: the objective with 1, 2 or 3 levels more, their steps paid, against the one without."""
    bar = tau * (1 + rise * depth)
    now, nodes, here = objective(drafted, active, bar, verify), drafted, frontier
    for levels in range(1, 4):
        if depth + levels > most:
            break
        here = here * reach[depth + levels - 1]
        nodes = np.concatenate([nodes, here], axis=1)
        if objective(nodes, active, bar, verify) - bar * levels * step > now:
            return True
    return False


def known(reach):
    won = jnp.array(reach, jnp.float32)
    return lambda state: state._replace(acceptance=state.acceptance._replace(tried=jnp.ones(4), won=won))


def extends(policy, plan, frontier, depth, drafted):
    depths = jnp.full(np.shape(drafted), depth, jnp.int32)
    call = extend if policy.extend is marginal.extend else policy.extend
    return bool(call(plan, logs(*frontier), jnp.int32(depth), logs(*drafted), depths))


@pytest.mark.parametrize("rise", [0.0, 0.5])
def test_levels_are_added_while_some_number_of_them_pays(rise):
    rng = np.random.default_rng(1)
    reach = np.array([0.9, 0.8, 0.7, 0.6], np.float32)
    verify = np.array([10, 13, 14, 14, 16, 16, 16, 16]) / 10
    spec = PolicySpec("marginal", tau=1.1, rise=rise)
    policy, _, plan = planned(spec, costs=table((10, 13, 14, 16), step=1.2), change=known(reach))
    seen = []
    for _ in range(80):
        drafted = np.sort(rng.uniform(0, 0.9, (2, 5)).astype(np.float32), axis=1)[:, ::-1].copy()
        depth = int(rng.integers(1, 5))
        found = extends(policy, plan, drafted[:, :2], depth, drafted)
        wanted = depth < 4 and pays(drafted, drafted[:, :2], depth, reach, 1.1, 0.12, verify, rise)
        assert found == wanted
        seen.append(found)
    assert set(seen) == {True, False}


def test_a_stair_in_the_cost_is_looked_over():
    """From 2 to 3 nodes the passes grow by 0.5, the fourth is free: only together do two levels pay."""
    reach = np.array([0.9, 0.9, 0.9, 0.9], np.float32)
    policy, _, plan = planned(
        PolicySpec("marginal", tau=1.5), costs=table((10, 11, 16, 16), step=0.0), change=known(reach)
    )
    drafted = np.array([[0.5, 0.0], [0.5, 0.0]], np.float32)
    verify = np.array([1, 1.1, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6])
    assert 0.5 * 0.9 < 1.5 * 0.5 < 0.5 * 0.9 + 0.5 * 0.9**2
    assert pays(drafted, drafted, 1, reach, 1.5, 0.0, verify)
    assert extends(policy, plan, drafted, 1, drafted)


def test_rows_that_have_ended_have_no_say():
    spec = PolicySpec("marginal", tau=1.0)
    for active, wanted in (((True, False), False), ((False, True), True)):
        policy, _, plan = planned(spec, costs=table(step=2.0), active=jnp.array(active))
        frontier = [[0.01, 0.0], [0.99, 0.0]]
        assert extends(policy, plan, frontier, 1, frontier) == wanted


def test_acceptance_of_nothing_ends_in_drafting_nothing():
    """Law 9: each round of a hopeless text costs more than a plain one, so the policy rests, longer and longer."""
    policy = POLICIES["marginal"](PolicySpec("marginal"), TREE)
    planning, learning = (
        jax.jit(policy.plan, static_argnums=3),
        jax.jit(policy.update),
    )  # thousands of steps else
    prices, state, drafted = table(), policy.init(), []
    for _ in range(200):
        plan = planning(state, prices, BOTH, 64)
        drafts = int(plan.depth) > 0
        drafted.append(drafts)
        none, node = [[1.0, 0.3]] * 2, [[0, 1]] * 2
        round_ = info(
            [0, 0], none, node, [[False, False]] * 2, levels=int(drafts), predicted=11.0 if drafts else 10.0
        )
        state = learning(state, plan, round_)
    assert sum(drafted[:10]) >= 3
    assert sum(drafted) <= 40  # what they cost more is 3 % at most where a round costs 10 % more
    assert sum(drafted[100:]) <= 10
    assert float(plan.price.reach[0]) < 0.3


@pytest.mark.parametrize(
    ("verify", "first", "step", "depth"),
    [
        ((10, 20.5, 41, 82), 0, 0, 0),  # a second row costs more than the token it may bring
        ((10, 17, 40, 80), 0, 0, 4),  # one right guess would just pay
        ((10, 17, 40, 80), 2, 0, 0),  # but not what it takes to open the round
        ((10, 19, 19, 19), 8, 5, 4),  # three right guesses pay for opening and two steps
        ((10, 19, 19, 19), 8, 9, 0),
    ],
)
def test_nothing_is_drafted_where_even_right_guesses_would_not_pay(verify, first, step, depth):
    _, _, plan = planned(costs=table(verify, step, first))
    assert int(plan.depth) == depth


def test_good_rounds_end_a_rest():
    policy = POLICIES["marginal"](PolicySpec("marginal"), TREE)
    state = policy.init()._replace(
        rest=jnp.int32(2), next_rest=jnp.int32(16), earned=jnp.float32(1.5), spent=jnp.float32(2.0)
    )
    good = info([2, 2], [[1.0, 0.9, 0.8]] * 2, [[0, 1, 2]] * 2, [[False, True, True]] * 2, predicted=12.0)
    idle = good.replace(levels=jnp.int32(0))
    depths = []
    for _ in range(4):
        plan = policy.plan(state, table(), BOTH, 64)
        depths.append(int(plan.depth))
        state = policy.update(state, plan, good if depths[-1] else idle)
    assert depths == [0, 0, 4, 4]
    assert int(state.next_rest) == marginal.FIRST_REST


def test_tau_is_what_the_run_reaches_and_never_below_one():
    for earned, spent, tau in ((30.0, 20.0, 1.5), (10.0, 20.0, 1.0)):
        _, _, plan = planned(
            change=lambda s, e=earned, c=spent: s._replace(earned=jnp.float32(e), spent=jnp.float32(c))
        )
        assert float(plan.price.tau) == pytest.approx(tau)


def test_more_load_means_fewer_nodes_and_levels():
    """Law 9: with the batch, rows of verification get dearer."""
    scores, depth = logs(*[[0.6, 0.5, 0.4, 0.3, 0.2, 0.1]] * 8), jnp.ones((8, 6), jnp.int32)
    nodes = []
    for load in (1, 4, 8):
        active = jnp.arange(8) < load
        policy, _, plan = planned(PolicySpec("marginal", tau=1.2), costs=table(batch_cost=3.0), active=active)
        nodes.append(int(policy.budget(plan, scores, depth)))
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] > nodes[-1]


def test_a_tree_of_draws_asks_no_score():
    """Its depth comes from acceptance so far: the depth whose expected tokens less their price is largest."""
    tree = TreeSpec("sampled", depth=4, width=1, children=1, nodes=5, buckets=(1, 2, 3, 4, 5))
    for rate, wanted in ((0.95, 4), (0.5, 2), (0.05, 1)):
        prices = table((10, 12, 14, 18), step=1.0)
        _, _, plan = planned(PolicySpec("marginal", tau=1.0), tree, prices, change=known([rate] * 4))
        gain, chosen = 0.0, []
        for depth in range(1, 5):
            gain += rate**depth
            verify = float(costs.at(prices.verify, 2, 64, 1 + depth)) / 10
            chosen.append(gain - (depth - 1) * 0.1 - verify)
        assert int(plan.depth) == 1 + int(np.argmax(chosen)) == wanted


# --- confidence ---


def test_confidence_stops_where_no_path_is_likely():
    spec = PolicySpec("confidence", threshold=0.3)
    policy, _, plan = planned(spec)
    for frontier, depth, wanted in (
        ([[0.29, 0.1], [0.31, 0.0]], 1, True),
        ([[0.29, 0.1], [0.28, 0.0]], 1, False),
        ([[0.9, 0.1], [0.9, 0.0]], 4, False),
    ):
        assert extends(policy, plan, frontier, depth, frontier) == wanted
    scores = logs([0.9, 0.4, 0.2, 0.0], [0.5, 0.2, 0.1, 0.0])
    assert int(policy.budget(plan, scores, jnp.ones((2, 4), jnp.int32))) == 3
    _, _, alone = planned(spec, active=jnp.array([False, True]))
    assert int(policy.budget(alone, scores, jnp.ones((2, 4), jnp.int32))) == 2


# --- reliability ---


def test_counts_by_depth_and_bin():
    counts = trust.nothing_seen(3)
    score = logs([1.0, 0.95, 0.42, 0.44], [1.0, 0.42, 0.0, 0.9])
    depth = jnp.array([[0, 1, 2, 2], [0, 2, 1, 1]])
    taken = jnp.array([[False, True, False, True], [False, False, False, False]])
    active = jnp.array([True, True])
    counts = trust.count(counts, score, depth, taken, jnp.array([2, 0]), active, jnp.float32(0.5))
    seen = np.zeros((3, trust.BINS))
    seen[0, 9], seen[1, 4] = 2, 3
    np.testing.assert_allclose(counts.seen, seen)
    np.testing.assert_allclose(counts.accepted[0, 9], 1)
    np.testing.assert_allclose(counts.accepted[1, 4], 1)
    np.testing.assert_allclose(counts.claimed[1, 4], 0.42 + 0.44 + 0.42, rtol=1e-5)
    # Both rows drafted levels 1 and 2; the second never reached the second.
    np.testing.assert_allclose(counts.tried, 0.5 * trust.ROUNDS + np.array([2, 1, 0]))
    np.testing.assert_allclose(counts.won, 0.5 * trust.ROUNDS * trust.REACH + np.array([1, 1, 0]))
    again = trust.count(
        counts, score, depth, taken, jnp.array([2, 0]), jnp.array([False, False]), jnp.float32(1.0)
    )
    np.testing.assert_allclose(again.seen, counts.seen)


def test_correction_finds_the_true_rate_of_an_overconfident_drafter():
    rng = np.random.default_rng(0)
    claimed = rng.uniform(0, 1, 4000).astype(np.float32)
    taken = rng.uniform(size=4000) < claimed**2
    one = jnp.ones((1, 4000), jnp.int32)
    counts = trust.count(
        trust.nothing_seen(1),
        jnp.log(claimed)[None],
        one,
        jnp.array(taken)[None],
        jnp.array([0]),
        jnp.array([True]),
        jnp.float32(1.0),
    )
    fixed = trust.corrected(trust.bias(counts), jnp.log(claimed), jnp.ones(4000, jnp.int32))
    assert np.abs(np.asarray(fixed) - claimed**2).mean() < 0.04 < np.abs(claimed - claimed**2).mean()
    before = float(trust.expected_calibration_error(counts)[0])
    honest = counts._replace(claimed=counts.accepted)
    assert before > 0.1
    assert float(trust.expected_calibration_error(honest)[0]) == 0
    assert float(trust.corrected(trust.bias(counts), jnp.array(-jnp.inf), jnp.int32(1))) == 0


def test_what_earlier_rounds_taught_is_the_start():
    bins = tuple(1000.0 if k == 7 else 0.0 for k in range(trust.BINS))
    low = tuple(300.0 if k == 7 else 0.0 for k in range(trust.BINS))
    high = tuple(750.0 if k == 7 else 0.0 for k in range(trust.BINS))
    taught = ReliabilitySpec((bins,), (high,), (low,), (100.0,), (90.0,))
    counts = trust.learned(taught, 3)
    rate = float(trust.corrected(trust.bias(counts), jnp.log(jnp.float32(0.75)), jnp.int32(1)))
    assert rate == pytest.approx(0.3, abs=0.03)
    assert float(
        trust.corrected(trust.bias(counts), jnp.log(jnp.float32(0.75)), jnp.int32(2))
    ) == pytest.approx(0.75)
    np.testing.assert_allclose(trust.reach(counts), [0.89, 0.6, 0.6], atol=0.01)
