"""Candidate finders judged on states: against NumPy, against a fixed list, and better after training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.retrieval.coverage import coverage, covered
from eagle4.retrieval.factors import truncated
from eagle4.train import head, head_study
from eagle4.train.head import HeadSpec, bands, covariance, head_loss, optimiser, update

V, D, N = 200, 10, 512
RNG = np.random.default_rng(0)
HEAD = RNG.normal(size=(V, D)).astype(np.float32)
STATES = (RNG.normal(size=(N, D)) * np.geomspace(2, 0.05, D)).astype(np.float32)


def test_coverage_is_what_numpy_counts():
    ids = np.stack([RNG.permutation(V)[:30] for _ in range(N)]).astype(np.int32)
    found = covered(jnp.asarray(ids), jnp.asarray(HEAD), jnp.asarray(STATES), k=4)
    logits = STATES @ HEAD.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    best = np.argsort(-logits, axis=1)[:, :4]
    among = (best[:, :, None] == ids[:, None]).any(-1)
    np.testing.assert_array_equal(found.top1, among[:, 0])
    np.testing.assert_allclose(found.top_k, among.mean(1), atol=1e-6)
    np.testing.assert_allclose(found.mass, np.take_along_axis(p, ids, 1).sum(1), rtol=1e-4)
    np.testing.assert_array_equal(found.token, best[:, 0])


def test_full_rank_covers_everything_there_is_room_for():
    found = coverage(truncated(HEAD, D), jnp.asarray(HEAD), jnp.asarray(STATES), 16, k=8)
    assert np.all(found.top1)
    np.testing.assert_allclose(found.top_k, 1)


@pytest.mark.parametrize("loss", head.LOSSES)
def test_training_moves_only_the_factors_and_lowers_its_loss(loss):
    spec = HeadSpec(loss, steps=60, batch=64, lr=3e-3, top=4)
    factors = truncated(HEAD, 3, covariance(STATES))
    W, states = jnp.asarray(HEAD), jnp.asarray(STATES)
    before = float(head_loss(factors, spec, W, states))
    state = optimiser(spec).init(factors)
    step = jax.jit(update, static_argnames="spec")
    for _ in range(spec.steps):
        factors, state, _ = step(spec, factors, state, W, states)
    assert float(head_loss(factors, spec, W, states)) < before - 0.01
    np.testing.assert_array_equal(W, HEAD)


def test_the_kl_loss_of_a_perfect_head_is_nothing():
    spec = HeadSpec("kl")
    assert float(head_loss(truncated(HEAD, D), spec, jnp.asarray(HEAD), jnp.asarray(STATES))) < 1e-4


def test_the_covariance_keeps_the_mean():
    shifted = STATES + 3
    np.testing.assert_allclose(covariance(shifted), shifted.T @ shifted / N, rtol=1e-4)


def test_bands_go_by_frequency_rank():
    counts = np.zeros(10000, np.int64)
    counts[7000], counts[5] = 9, 8
    assert bands(counts, np.array([7000, 5, 9999])).tolist() == [0, 0, 3]


def test_a_fixed_list_is_the_frequent_tokens():
    counts = np.arange(V)[::-1]
    test = head_study.States(STATES, np.zeros(N, np.int32))
    found = head_study.fixed_list(jnp.asarray(HEAD), counts, 25, test)
    best = (STATES @ HEAD.T).argmax(1)
    np.testing.assert_array_equal(found.top1, best < 25)
    np.testing.assert_array_equal(found.token, best)


def test_what_a_list_misses_is_told_most_often_missed_first():
    counts = np.arange(V)[::-1]
    found = head_study.fixed_list(
        jnp.asarray(HEAD), counts, 25, head_study.States(STATES, np.zeros(N, np.int32))
    )
    rows = head_study.by_frequency(found, counts)
    best = (STATES @ HEAD.T).argmax(1)
    often = np.bincount(best[best >= 25], minlength=V)
    assert rows[-1]["missed"][0] == often.argmax()
    assert set(rows[-1]["missed"]) <= set(best[best >= 25].tolist())
    assert sum(r["states"] for r in rows) == N


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss": "l2"}, "head.loss 'l2' is not known; use one of kl, top"),
        ({"steps": -1}, "head.steps must be at least 0, got -1"),
        ({"batch": 0}, "head.batch must be at least 1, got 0"),
        ({"lr": 0.0}, "head.lr must be positive"),
    ],
)
def test_bad_numbers_are_named(fields, said):
    with pytest.raises(BadInput, match=said):
        HeadSpec(**fields)
