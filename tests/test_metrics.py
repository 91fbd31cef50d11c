"""Metrics against counts made by hand and a slow oracle that follows the definitions word by word."""

import math

import numpy as np
import pytest
from kit import round_info

from eagle4 import metrics, summary
from eagle4.metrics import Rounds
from eagle4.summary import Sample


def make_rounds(depth, accepted, committed=None, nodes=None, verified=None) -> Rounds:
    depth, accepted = np.array(depth, np.int64), np.array(accepted, np.int64)
    nodes = depth if nodes is None else np.array(nodes, np.int64)
    committed = accepted + 1 if committed is None else np.array(committed, np.int64)
    return Rounds(
        depth, nodes, nodes + 1 if verified is None else np.array(verified, np.int64), accepted, committed
    )


# Depths 4, 2, 0, 4, 4; the last round is cropped at a stop token: 3 accepted and 1 drawn, but 2 received.
HAND = make_rounds(
    [4, 2, 0, 4, 4],
    [4, 0, 0, 1, 3],
    committed=[5, 1, 1, 2, 2],
    nodes=[6, 2, 0, 6, 6],
    verified=[8, 4, 1, 8, 8],
)


def test_definitions_on_counts_made_by_hand():
    assert metrics.tau(HAND) == (5 + 1 + 1 + 2 + 4) / 5
    assert metrics.tau_commit(HAND) == 11 / 5
    assert metrics.histogram(HAND).tolist() == [2, 1, 0, 1, 1]
    np.testing.assert_allclose(metrics.joint_rate(HAND), [3 / 4, 2 / 4, 2 / 3, 1 / 3])
    np.testing.assert_allclose(metrics.conditional_rate(HAND), [3 / 4, 2 / 3, 2 / 2, 1 / 2])
    assert metrics.draft_acceptance_rate(HAND) == 8 / 14
    assert metrics.verification_yield(HAND) == 11 / 29
    metrics.check_identities(HAND, tokens=11)


def test_position_rates_follow_their_definitions_at_mixed_depth():
    rng = np.random.default_rng(3)
    depth = rng.integers(0, 6, 200)
    accepted = rng.integers(0, depth + 1)
    rounds = make_rounds(depth, accepted)
    for k in range(1, 6):
        able = [a for a, n in zip(accepted, depth) if n >= k]
        reached = [a for a in able if a >= k - 1]
        assert metrics.joint_rate(rounds)[k - 1] == sum(a >= k for a in able) / len(able)
        assert metrics.conditional_rate(rounds)[k - 1] == sum(a >= k for a in reached) / len(reached)


def test_fixed_depth_identities():
    rng = np.random.default_rng(0)
    rounds = make_rounds(np.full(50, 3), rng.integers(0, 4, 50))
    assert metrics.tau(rounds) == pytest.approx(metrics.tau_from_joint(metrics.joint_rate(rounds)))
    np.testing.assert_allclose(metrics.conditional_rate(rounds).cumprod(), metrics.joint_rate(rounds))
    metrics.check_identities(rounds)


def test_a_position_no_round_reached_has_no_conditional_rate():
    rounds = make_rounds([2, 2], [0, 0])
    assert metrics.joint_rate(rounds).tolist() == [0, 0]
    assert metrics.conditional_rate(rounds)[0] == 0
    assert math.isnan(metrics.conditional_rate(rounds)[1])
    metrics.check_identities(rounds)


def test_pooled_and_per_request_tau_differ_on_unequal_answers():
    long, short = make_rounds([4] * 9, [0] * 9), make_rounds([4], [4])
    assert metrics.tau(metrics.pool([long, short])) == (9 * 1 + 5) / 10
    assert metrics.tau_per_request([long, short]) == (1 + 5) / 2


def test_nothing_recorded_is_nan_not_an_error():
    empty = make_rounds([], [])
    assert all(math.isnan(f(empty)) for f in (metrics.tau, metrics.tau_commit, metrics.verification_yield))
    assert math.isnan(metrics.tau_per_request([empty]))
    assert metrics.joint_rate(empty).tolist() == []
    assert all(np.array_equal(a, b) for a, b in zip(metrics.pool([]), empty))
    metrics.check_identities(empty, tokens=0)


def test_leviathan_predictions():
    """Speed-ups at α = 0.8, computed from arXiv 2211.17192 by others and to three digits."""
    for depth, cheap, costly in ((1, 1.714, 1.385), (3, 2.567, 1.554), (5, 2.951, 1.476)):
        assert metrics.walltime_factor(0.8, depth, 0.05) == pytest.approx(cheap, abs=5e-4)
        assert metrics.walltime_factor(0.8, depth, 0.3) == pytest.approx(costly, abs=5e-4)
    assert metrics.block_efficiency(1.0, 4) == 5
    assert metrics.block_efficiency(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)


def test_history_rows_keep_only_active_rounds():
    info = round_info(
        active=np.array([[True, True], [True, False], [True, False]]),
        drafted_depth=np.array([[3, 2], [3, 0], [1, 0]]),
        drafted_nodes=np.array([[3, 2], [3, 0], [1, 0]]),
        verified_nodes=np.array([4, 4, 2]),
        num_accepted=np.array([[3, 1], [0, 0], [1, 0]]),
        num_committed=np.array([[4, 2], [1, 0], [1, 0]]),
    )
    first, second = metrics.rounds_of(info, 0), metrics.rounds_of(info, 1)
    assert [c.tolist() for c in first] == [[3, 3, 1], [3, 3, 1], [4, 4, 2], [3, 0, 1], [4, 1, 1]]
    assert [c.tolist() for c in second] == [[2], [2], [4], [1], [2]]


@pytest.mark.parametrize(
    ("change", "identity"),
    [
        ({"accepted": [4, 3, 0]}, "accepted ≤ drafted depth"),
        ({"committed": [4, 3, 1]}, "committed ≤ accepted"),
        ({"committed": [2, 2, 1]}, "only the last round"),
        ({"committed": [4, 2, 0]}, "at least one token"),
        ({"accepted": [3, -1, 0], "committed": [4, 1, 1]}, "never negative"),
        ({"verified": [4, 2, 4]}, "≤ verified nodes"),
        ({"nodes": [2, 3, 3]}, "≤ drafted nodes"),
        ({"accepted": [3, 1]}, "one entry per round"),
    ],
)
def test_each_broken_identity_is_named(change, identity):
    good = {"depth": [3, 3, 3], "accepted": [3, 1, 0], "committed": [4, 2, 1]}
    metrics.check_identities(make_rounds(**good), tokens=7)
    with pytest.raises(ValueError, match=identity):
        metrics.check_identities(make_rounds(**{**good, **change}))


def test_tokens_counted_elsewhere_must_agree():
    with pytest.raises(ValueError, match="Σ chunks"):
        metrics.check_identities(HAND, tokens=12)


def sample(method, prompt, rounds, seconds, **more) -> Sample:
    values = {"category": "code", "prompt_tokens": 10, "prefill_s": 0.5, "identical": True, **more}
    return Sample(
        method, prompt, tokens=int(rounds.num_committed.sum()), decode_s=seconds, rounds=rounds, **values
    )


def plain(prompt, tokens, seconds, **more) -> Sample:
    return sample("ar", prompt, make_rounds([0] * tokens, [0] * tokens), seconds, **more)


def test_speed_is_a_ratio_of_totals_over_the_same_prompts():
    baseline = [plain("a", 10, 1.0), plain("b", 10, 4.0), plain("unused", 10, 100.0)]
    ours = [sample("x", "a", HAND, 1.1), sample("x", "b", make_rounds([4] * 4, [4] * 4), 2.0)]
    row = summary.summarise(ours, baseline)[-1]
    assert (row.method, row.category, row.prompts, row.tokens, row.rounds) == ("x", "all", 2, 31, 9)
    assert row.tokens_per_s == pytest.approx(31 / 3.1)
    assert row.speedup_vs_ar == pytest.approx((31 / 3.1) / (20 / 5.0))
    assert row.round_ms == pytest.approx(3100 / 9)
    assert row.ttft_ms == pytest.approx(500)
    assert row.tau == pytest.approx((13 + 20) / 9)
    assert row.tau_commit == pytest.approx(31 / 9)
    assert row.tau_per_request == pytest.approx((13 / 5 + 5) / 2)


def test_plain_decoding_over_itself_is_exactly_one():
    rng = np.random.default_rng(1)
    baseline = [plain(f"p{i}", int(rng.integers(1, 40)), float(rng.random())) for i in range(7)]
    for row in summary.summarise(baseline, baseline):
        assert (row.speedup_vs_ar, row.speedup_low, row.speedup_high) == (1.0, 1.0, 1.0)
        assert row.tau == 1
        assert row.joint == []


def test_bootstrap_is_paired_and_covers_the_spread():
    """Twice as fast on every prompt, however slow: no spread. Between 1× and 3×: an oracle's interval."""
    rng = np.random.default_rng(2)
    seconds = rng.uniform(0.1, 1.0, 30)
    baseline = [plain(f"p{i}", 20, s) for i, s in enumerate(seconds)]
    twice = [sample("x", f"p{i}", make_rounds([0] * 20, [0] * 20), s / 2) for i, s in enumerate(seconds)]
    np.testing.assert_allclose(summary.speedup_interval(twice, baseline), 2.0)
    factors = rng.uniform(1, 3, 30)
    mixed = [s._replace(decode_s=t / f) for s, t, f in zip(twice, seconds, factors)]
    point, low, high = summary.speedup_interval(mixed, baseline)
    drawn = [rng.choice(30, 30) for _ in range(4000)]
    oracle = np.quantile([seconds[d].sum() / (seconds / factors)[d].sum() for d in drawn], (0.025, 0.975))
    assert point == pytest.approx(seconds.sum() / (seconds / factors).sum())
    np.testing.assert_allclose((low, high), oracle, rtol=0.02)
    assert high - low == pytest.approx(oracle[1] - oracle[0], rel=0.08)
    assert summary.speedup_interval(mixed, baseline) == (point, low, high)


def test_turns_of_one_prompt_are_resampled_together():
    """One conversation of 8 turns is one prompt: no interval, however the turns scatter."""
    baseline = [plain("a", 5, 1.0, turn=t) for t in range(8)]
    ours = [s._replace(method="x", decode_s=0.1 + t / 10) for t, s in enumerate(baseline)]
    row = summary.summarise(ours, baseline)[-1]
    assert row.prompts == 1
    assert row.speedup_vs_ar == pytest.approx(8 / (0.8 + 2.8))
    assert (row.speedup_low, row.speedup_high) == (None, None)


def test_rows_by_method_and_category():
    baseline = [plain("a", 4, 1.0), plain("b", 4, 1.0, category="qa")]
    ours = [s._replace(method="x", decode_s=0.5, ties=2) for s in baseline]
    ours[1] = ours[1]._replace(identical=False)
    rows = summary.summarise([*baseline, *ours], baseline)
    assert [(r.method, r.category) for r in rows] == [
        (m, c) for m in ("ar", "x") for c in ("code", "qa", "all")
    ]
    assert [r.greedy_identical for r in rows] == [True, True, True, True, False, False]
    assert [r.ties for r in rows] == [0, 0, 0, 2, 2, 4]


def test_what_was_not_measured_is_none():
    ours = [
        sample("x", "a", make_rounds([], []), 0.0, identical=None),
        sample("x", "b", HAND, 1.0, identical=None),
    ]
    row = summary.summarise(ours[:1], [])[0]
    assert (row.tau, row.tokens_per_s, row.speedup_vs_ar, row.greedy_identical) == (None, None, None, None)
    assert (row.draft_ms, row.verify_ms, row.commit_ms, row.round_ms) == (None, None, None, None)
    assert summary.summarise(ours, [])[-1].tokens_per_s == 11


def test_phase_times_weigh_requests_by_their_rounds():
    timed = {"draft_ms": 1.0, "verify_ms": 10.0, "commit_ms": 0.1}
    slow = {"draft_ms": 3.0, "verify_ms": 20.0, "commit_ms": 0.2}
    ours = [
        sample("x", "a", make_rounds([1] * 3, [0] * 3), 1.0, **timed),
        sample("x", "b", make_rounds([1], [0]), 1.0, **slow),
        sample("x", "c", make_rounds([1] * 50, [0] * 50), 1.0),
    ]
    row = summary.summarise(ours, [])[-1]
    assert (row.draft_ms, row.verify_ms) == (1.5, 12.5)
    assert row.commit_ms == pytest.approx(0.125)


def test_an_unfair_comparison_is_refused():
    with pytest.raises(ValueError, match="baseline has no sample for prompt 'b'"):
        summary.summarise([plain("b", 3, 1.0)], [plain("a", 3, 1.0)])
    with pytest.raises(ValueError, match="share a prompt_id"):
        summary.summarise([plain("a", 3, 1.0), plain("a", 3, 1.0)], [])
    with pytest.raises(ValueError, match="Σ chunks"):
        summary.summarise([plain("a", 3, 1.0)._replace(tokens=4)], [])
