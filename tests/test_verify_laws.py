"""Node laws against independent float64 recursions over the dense vocabulary, and the check of proposals."""

import exact_law as ex
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.types import Proposal
from eagle4.verify import VERIFIERS, check_proposal
from eagle4.verify.point_mass import law as point_mass
from eagle4.verify.rejection import law as rejection


def test_point_mass_equals_trying_children_one_by_one():
    """accept x with p(x), else zero it and renormalise (EAGLE's loop), in float64."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet([0.5] * 6, size=200)
    tokens = rng.integers(0, 6, size=(200, 4))
    valid = rng.random((200, 4)) < 0.8
    take, rest = np.zeros((200, 4)), np.zeros((200, 6))
    for b in range(200):
        left, reach = p[b].copy(), 1.0
        for k in range(4):
            if valid[b, k] and left[tokens[b, k]] > 0:
                take[b, k] = reach * left[tokens[b, k]]
                reach *= 1 - left[tokens[b, k]]
                left[tokens[b, k]] = 0
                left /= left.sum()
        rest[b] = reach * left
    law = point_mass(jnp.asarray(p, jnp.float32), jnp.asarray(tokens, jnp.int32), jnp.asarray(valid))
    np.testing.assert_allclose(law.take, take, atol=1e-6)
    np.testing.assert_allclose(law.residual, rest, atol=1e-6)


@pytest.mark.parametrize("replace", [False, True])
def test_rejection_laws_equal_the_dense_recursion_on_a_larger_vocabulary(replace):
    """r ← norm(max(r − q, 0)) with normalised r and q over the whole vocabulary, in float64."""
    rng = np.random.default_rng(1)
    rows, vocab, candidates, children = 40, 300, 24, 4
    p = rng.dirichlet([0.05] * vocab, size=rows)
    ids = np.stack([rng.permutation(vocab)[:candidates] for _ in range(rows)])
    ids[:, 0] = p.argmax(-1)
    ids[:, 1:] = np.where(ids[:, 1:] == ids[:, :1], (ids[:, :1] + 1) % vocab, ids[:, 1:])
    probs = rng.dirichlet([0.3] * candidates, size=rows)
    take, rest = np.zeros((rows, children)), np.zeros((rows, vocab))
    tokens = np.zeros((rows, children), np.int32)
    for b in range(rows):
        q, r, reach = np.zeros(vocab), p[b], 1.0
        np.add.at(q, ids[b], probs[b])
        for k in range(children):
            y = tokens[b, k] = rng.choice(vocab, p=q)
            accept = min(1.0, r[y] / q[y])
            take[b, k] = reach * accept
            reach *= 1 - accept
            r = np.maximum(r - q, 0)
            r = r / r.sum()
            if not replace:
                q[y] = 0
                q = q / q.sum()
        rest[b] = r
    law = VERIFIERS["multi_round" if replace else "rejection"].law
    got = law(
        jnp.asarray(p, jnp.float32),
        tokens,
        jnp.ones((rows, children), bool),
        ids,
        jnp.asarray(probs, jnp.float32),
    )
    np.testing.assert_allclose(got.take, take, atol=2e-6)
    np.testing.assert_allclose(ex.normalise(np.asarray(got.residual)), rest, atol=2e-5)


def test_a_child_outside_the_proposal_is_passed_over():
    p = jnp.array([[0.4, 0.4, 0.2]])
    ids, probs = jnp.array([[1, 2, 0]]), jnp.array([[0.5, 0.5, 0.0]])
    law = rejection(p, jnp.array([[0, 1]]), jnp.ones((1, 2), bool), ids, probs)
    np.testing.assert_allclose(law.take, [[0.0, 0.8]], atol=1e-6)
    np.testing.assert_allclose(law.residual, [[0.4, 0.0, 0.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "probs", "message"),
    [
        ([0, 1], [0.5, np.nan], "NaN"),
        ([0, 1], [1.5, -0.5], "pass probabilities"),
        ([0, 1], [0.5, 0.4], "renormalise"),
        ([1, 1], [0.5, 0.5], "twice"),
        ([0, 3], [0.5, 0.5], "leave 0..2"),
        ([0, 1, 2, 0], [0.5, 0.5, 0.0, 0.0], "4 candidates for 3 tokens"),
        ([0, 1, 2], [0.5, 0.5], "one id per probability"),
    ],
)
def test_check_proposal_refuses(ids, probs, message):
    with pytest.raises(BadInput, match=message):
        check_proposal(Proposal(np.array([[ids]]), np.array([[probs]])), vocab_size=3)


def test_check_proposal_allows_inert_slots():
    check_proposal(Proposal(np.array([[[2, 0, 0]]]), np.array([[[0.25, 0.75, 0.0]]])), vocab_size=3)
