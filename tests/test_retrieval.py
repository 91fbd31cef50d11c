"""Low-rank candidates: best possible factors, nothing lost at full rank, and q over exactly what was scored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.retrieval.factors import Factors, truncated
from eagle4.retrieval.shortlist import SELECTIONS, blocked, exact, rescored, retrieve, shortlist, strided

V, D = 300, 12
RNG = np.random.default_rng(0)
HEAD = RNG.normal(size=(V, D)).astype(np.float32)
MIX = RNG.normal(size=(D, D)) * np.geomspace(3, 0.02, D)
STATES = (RNG.normal(size=(4000, D)) @ MIX.T).astype(np.float32)
COVARIANCE = MIX @ MIX.T


def error(factors: Factors, states=STATES) -> float:
    """Mean squared score error over states."""
    wrong = states @ HEAD.T - (states @ np.asarray(factors.down).T) @ np.asarray(factors.up).T
    return float((wrong**2).sum(1).mean())


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_whitened_factors_have_the_least_error_there_is(rank):
    """Eckart–Young: the squared singular values of W C^½ beyond the rank; random changes only make it worse."""
    singular = np.linalg.svd(HEAD @ np.linalg.cholesky(COVARIANCE), compute_uv=False)
    best = truncated(HEAD, rank, COVARIANCE)
    exact_error = np.trace((HEAD - best.up @ best.down) @ COVARIANCE @ (HEAD - best.up @ best.down).T)
    np.testing.assert_allclose(exact_error, (singular[rank:] ** 2).sum(), rtol=1e-3)
    plain = truncated(HEAD, rank)
    assert error(best) < 0.9 * error(plain)
    for seed in range(3):
        noise = np.random.default_rng(seed)
        moved = Factors(*(x + 0.01 * noise.normal(size=x.shape).astype(np.float32) for x in best))
        assert error(moved) > error(best)


def test_plain_factors_are_the_truncated_svd():
    u, s, v = np.linalg.svd(HEAD.astype(np.float64), full_matrices=False)
    factors = truncated(HEAD, 5)
    np.testing.assert_allclose(factors.up @ factors.down, (u[:, :5] * s[:5]) @ v[:5], atol=1e-5)


def test_frequent_tokens_are_scored_better_when_they_weigh_more():
    weight = np.ones(V)
    weight[:20] = 200.0

    def wrong(factors):
        rows = (HEAD - factors.up @ factors.down) @ COVARIANCE
        return float((rows[:20] * (HEAD - factors.up @ factors.down)[:20]).sum())

    assert wrong(truncated(HEAD, 4, COVARIANCE, weight)) < wrong(truncated(HEAD, 4, COVARIANCE))


def test_full_rank_finds_the_heads_own_best():
    factors = Factors(*map(jnp.asarray, truncated(HEAD, D, COVARIANCE)))
    states = jnp.asarray(STATES[:32])
    best = jax.lax.top_k(states @ HEAD.T, 9)[1]
    np.testing.assert_array_equal(shortlist(factors, states, 9), best)


def test_a_rank_beyond_the_width_is_refused():
    for rank in (0, D + 1):
        with pytest.raises(BadInput, match=rf"retrieval.rank must lie in 1..{D}.*got {rank}"):
            truncated(HEAD, rank)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("size", [300, 256, 64])
def test_selections_give_distinct_real_ids_and_the_best_one_first(name, size):
    scores = jnp.asarray(RNG.normal(size=(5, 3, size)).astype(np.float32))
    ids = np.asarray(SELECTIONS[name](scores, 17))
    assert ids.shape == (5, 3, 17)
    assert ids.min() >= 0
    assert ids.max() < size
    assert all(len(set(row)) == 17 for row in ids.reshape(-1, 17).tolist())
    np.testing.assert_array_equal(ids[..., 0], np.argmax(scores, -1))
    picked = np.take_along_axis(np.asarray(scores), ids, -1)
    assert (np.diff(picked, axis=-1) <= 0).all()


def test_what_the_fast_selections_may_miss():
    """Blocks of 75 neighbours send at most twice their share; buckets keep one of each stride."""
    crowded = jnp.zeros((1, 300)).at[0, :10].set(jnp.arange(10.0) + 1)
    assert np.asarray(exact(crowded, 4))[0].tolist() == [9, 8, 7, 6]
    assert np.asarray(blocked(crowded, 4, blocks=4))[0, :2].tolist() == [9, 8]
    assert set(np.asarray(blocked(crowded, 4, blocks=4))[0, 2:]) & {7, 6} == set()
    assert np.asarray(strided(crowded, 4, buckets=100))[0].tolist() == [9, 8, 7, 6]
    shared = jnp.zeros((1, 300)).at[0, jnp.array([5, 105, 205, 7])].set(jnp.array([4.0, 3.0, 2.0, 1.0]))
    assert np.asarray(strided(shared, 2, buckets=100))[0].tolist() == [5, 7]


def test_q_is_a_softmax_of_exact_logits_over_the_shortlist():
    factors = Factors(*map(jnp.asarray, truncated(HEAD, 6, COVARIANCE)))
    states = jnp.asarray(STATES[:8]).reshape(2, 4, D)
    ids, q = retrieve(factors, jnp.asarray(HEAD), states, 20)
    logits = np.take_along_axis(np.asarray(states @ HEAD.T), np.asarray(ids), -1)
    np.testing.assert_allclose(rescored(jnp.asarray(HEAD), states, ids), logits, rtol=1e-4, atol=1e-4)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(q, e / e.sum(-1, keepdims=True), rtol=1e-3, atol=1e-6)
