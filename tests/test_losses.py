"""Losses against NumPy, and the shared candidate set as an estimate of the whole vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.train import losses
from eagle4.train.spec import ObjectiveSpec, PhaseSpec, TrainSpec

RNG = np.random.default_rng(0)
TEACHER, STUDENT = RNG.normal(size=(2, 3, 7)) * 3, RNG.normal(size=(2, 3, 7)) * 3


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


P, Q = softmax(TEACHER), softmax(STUDENT)
EXPECTED = {
    "soft_ce": -(P * np.log(Q)).sum(-1),
    "kl": (P * np.log(P / Q)).sum(-1),
    "acceptance": -np.log(np.minimum(P, Q).sum(-1)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_token_losses(name):
    found = losses.TOKEN_LOSSES[name](jnp.asarray(TEACHER, jnp.float32), jnp.asarray(STUDENT, jnp.float32))
    np.testing.assert_allclose(found, EXPECTED[name], rtol=1e-4)


def test_a_perfect_drafter_has_no_kl_and_is_always_accepted():
    z = jnp.asarray(TEACHER, jnp.float32)
    np.testing.assert_allclose(losses.kl(z, z), 0, atol=1e-6)
    np.testing.assert_allclose(losses.acceptance(z, z), 0, atol=1e-6)
    np.testing.assert_allclose(losses.soft_ce(z, z), -(P * np.log(P)).sum(-1), rtol=1e-4)


def test_the_acceptance_loss_is_finite_where_nothing_overlaps():
    apart = jnp.array([[200.0, 0.0]]), jnp.array([[0.0, 200.0]])
    assert np.isfinite(losses.acceptance(*apart)).all()
    assert np.isfinite(jax.grad(lambda s: losses.acceptance(apart[0], s).sum())(apart[1])).all()


def test_smooth_l1_as_drawn():
    found = losses.smooth_l1(jnp.array([[0.0, 0.5], [3.0, -2.0]]), jnp.zeros((2, 2)))
    np.testing.assert_allclose(found, [(0 + 0.125) / 2, (2.5 + 1.5) / 2])


def test_normalisers_divide_by_what_they_say():
    each = jnp.array([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]])
    mask = jnp.array([[1, 1, 0, 0], [0, 0, 0, 1]], bool)
    said = {"valid": 131 / 3, "rows": 131 / 8, "sequence": (1.5 + 128) / 2}
    for name, value in said.items():
        np.testing.assert_allclose(losses.normalised(each, mask, name), value, rtol=1e-6)
    poisoned = each.at[0, 2].set(jnp.nan)
    assert all(np.isfinite(losses.normalised(poisoned, mask, name)) for name in said)
    assert all(losses.normalised(each, mask & False, name) == 0 for name in said)


def test_candidates_hold_what_is_certain_once_and_estimate_the_rest():
    V, size = 60, 24
    tokens = jnp.array([[3, 3, 9, 41]])
    frequent = jnp.zeros(V, bool).at[jnp.arange(5)].set(True)
    certain = {0, 1, 2, 3, 4, 9, 41}
    values = np.exp(RNG.normal(size=V))
    sums = []
    for seed in range(300):
        ids, log_weight = losses.shared_candidates(tokens, frequent, size, jax.random.key(seed))
        ids, weight = np.asarray(ids), np.exp(np.asarray(log_weight))
        assert len(set(ids.tolist())) == size
        assert certain <= set(ids.tolist())
        np.testing.assert_allclose(weight[np.isin(ids, list(certain))], 1)
        sums.append((values[ids] * weight).sum())
    error = np.std(sums) / np.sqrt(len(sums))
    assert abs(np.mean(sums) - values.sum()) < 4 * error


def test_too_many_certain_tokens_are_cut_not_doubled():
    ids, log_weight = losses.shared_candidates(
        jnp.arange(30)[None], jnp.zeros(60, bool), 8, jax.random.key(0)
    )
    assert len(set(np.asarray(ids).tolist())) == 8
    assert np.all(np.asarray(ids) < 30)
    assert np.all(np.asarray(log_weight) == 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ObjectiveSpec(loss="l2"),
            "objective.loss 'l2' is not known; use one of soft_ce, kl, acceptance",
        ),
        (lambda: ObjectiveSpec(normaliser="mean"), "objective.normaliser 'mean' is not known"),
        (lambda: ObjectiveSpec(token_weight=0), "both 0: nothing would be learned"),
        (lambda: ObjectiveSpec(noise=-1.0), "objective.noise must be at least 0, got -1.0"),
        (lambda: ObjectiveSpec(step_decay=0.0), "objective.step_decay must lie in"),
        (lambda: PhaseSpec(0, 1, 1e-3), "a phase needs at least 1 step, got 0"),
        (lambda: PhaseSpec(1, 0, 1e-3), "unroll must lie in 1..16, got 0"),
        (lambda: PhaseSpec(1, 1, 0.0), "lr must be positive"),
        (lambda: TrainSpec(phases=()), "train.phases is empty"),
        (lambda: TrainSpec(share=0.0), "train.share must lie in"),
        (lambda: TrainSpec(length=0), "train.length must be at least 1, got 0"),
    ],
)
def test_bad_numbers_are_refused_by_name(make, said):
    with pytest.raises(BadInput, match=said):
        make()
