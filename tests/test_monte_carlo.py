"""Law 2 through the real loop: the joint distribution of the first three tokens, drawn by the thousand.

The exact law is enumerated elsewhere and is the gate. This catches what enumeration can't see: uniforms that are used
twice, a draft that is not drawn from the q it hands over, a round that forgets what the last one decided.
"""

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from jax.scipy.special import gammaincc
from kit import answers, begin, numpy_logits, tiny_params
from toy import toy_params

from eagle4 import decode
from eagle4.decode import Params
from eagle4.specs import DrafterSpec, ModelSpec, SamplingSpec, System, TreeSpec
from eagle4.verify import VERIFIERS, Verifier
from eagle4.verify.rejection import law as rejection
from eagle4.verify.walk import verify_by

pytestmark = pytest.mark.slow

MODEL = ModelSpec("llama", 8, 8, 8, 1, 1, 1, 8, 128)
PROMPT = [3, 1, 4, 1, 5]
TOKENS, BATCH, CALLS = 3, 2048, 4
DRAWS = BATCH * CALLS
FLAT = SamplingSpec(temperature=1.5, seed=3)
CUT = SamplingSpec(temperature=1.2, top_k=6, top_p=0.9, seed=3)

TOY = DrafterSpec("toy")
CHAIN = TreeSpec("chain", 2, 1, 1, 3, buckets=(3,))
DRAWN_CHAIN = TreeSpec("sampled", 3, 1, 1, 4, buckets=(4,))
DYNAMIC = TreeSpec("dynamic", 2, 2, 2, 6, buckets=(6,))
SAMPLED = TreeSpec("sampled", 2, 2, 3, 9, buckets=(9,))

METHODS = {
    "plain": (DrafterSpec("none"), TreeSpec(depth=0, nodes=1), "point_mass", FLAT),
    "chain": (TOY, CHAIN, "point_mass", FLAT),
    "dynamic": (TOY, DYNAMIC, "point_mass", FLAT),
    "drawn chain": (TOY, DRAWN_CHAIN, "rejection", FLAT),
    "block": (TOY, DRAWN_CHAIN, "block", FLAT),
    "sampled": (TOY, SAMPLED, "rejection", FLAT),
    "sampled, top-k and top-p": (TOY, SAMPLED, "rejection", CUT),
    "independent": (DrafterSpec("toy_independent"), SAMPLED, "multi_round", FLAT),
}


class Fit(NamedTuple):
    """How well draws fit a law: p-value of χ², total variation, and the most that chance allows at 10⁻⁴."""

    p_value: float
    variation: float
    allowed: float


def processed(logits: np.ndarray, spec: SamplingSpec) -> np.ndarray:
    """p in plain float64 NumPy, with sorting where the product bisects."""
    weight = np.exp((logits - logits.max()) / spec.temperature)
    order = np.argsort(-weight)
    if spec.top_k:
        weight[order[spec.top_k :]] = 0
    p = weight / weight.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= spec.top_p]] = 0
    return p / p.sum()


@cache
def exact_law(spec: SamplingSpec) -> np.ndarray:
    """P(first three tokens) [V, V, V], one whole forward pass per prefix."""
    V, params = MODEL.vocab_size, tiny_params(MODEL, seed=4)
    joint = np.ones(())
    for i in range(TOKENS):
        prefixes = itertools.product(range(V), repeat=i)
        p = [processed(numpy_logits(params, MODEL, PROMPT + list(x))[-1], spec) for x in prefixes]
        joint = joint[..., None] * np.reshape(p, (V,) * (i + 1))
    return joint


def draws(system: System) -> tuple[np.ndarray, np.ndarray]:
    """Counts [V, V, V] over many requests that differ by seed alone, and how many tokens each round accepted."""
    drafter = toy_params(MODEL, seed=4, noise=1.0) if system.drafter.name != "none" else None
    params = Params(tiny_params(MODEL, seed=4), drafter)
    counts, accepted = np.zeros((MODEL.vocab_size,) * TOKENS, np.int64), []
    for call in range(CALLS):
        seeds = np.arange(BATCH) + BATCH * call
        state = begin(system, params, [PROMPT] * BATCH, 12, seeds=seeds, capacity=64)
        state, history, _ = decode.generate(system, params, state, 2)
        first = np.array([ids[:TOKENS] for ids in answers(state)])
        np.add.at(counts, tuple(first.T), 1)
        accepted.append(np.asarray(history.num_accepted))
    return counts, np.stack(accepted)


def fit(counts: np.ndarray, law: np.ndarray) -> Fit:
    """χ² over the cells that expect at least 5 draws, the rest being one cell; total variation over all cells."""
    seen, expected = counts.ravel(), law.ravel() * counts.sum()
    big = expected >= 5
    seen5 = np.append(seen[big], seen[~big].sum())
    expected5 = np.append(expected[big], expected[~big].sum())
    real = expected5 > 0
    assert not seen5[~real].any()
    statistic = ((seen5 - expected5)[real] ** 2 / expected5[real]).sum()
    p_value = float(gammaincc((real.sum() - 1) / 2, statistic / 2))
    n, p = counts.sum(), law.ravel()
    # E|x − np| ≤ √(np(1 − p)); one draw moves the distance by at most 1/n (McDiarmid's inequality).
    allowed = np.sqrt(p * (1 - p) / n).sum() / 2 + math.sqrt(math.log(1e4) / (2 * n))
    return Fit(p_value, float(np.abs(seen / n - p).sum() / 2), float(allowed))


def system_of(name: str) -> System:
    drafter, tree, verifier, sampling = METHODS[name]
    return System(MODEL, drafter, tree, verifier=verifier, sampling=sampling)


@pytest.mark.parametrize("name", METHODS)
def test_tokens_follow_the_targets_law(name):
    counts, accepted = draws(system_of(name))
    assert counts.sum() == DRAWS
    result = fit(counts, exact_law(METHODS[name][-1]))
    assert result.p_value > 1e-4
    assert result.variation < result.allowed
    depth = METHODS[name][1].depth
    assert set(np.unique(accepted)) == set(range(depth + 1))


def residual_is_p(p, tokens, valid, ids, probs):
    """The classic mistake: after a refusal, draw from p as if nothing had been tried."""
    return rejection(p, tokens, valid, ids, probs)._replace(residual=p)


def test_that_many_draws_show_a_wrong_residual():
    def verify(p, draft, uniforms, max_depth, max_children):
        return verify_by(residual_is_p, p, draft, uniforms, max_depth, max_children)

    VERIFIERS["planted"] = Verifier(verify, residual_is_p, "drawn")
    counts, _ = draws(replace(system_of("sampled"), verifier="planted"))
    del VERIFIERS["planted"]
    result = fit(counts, exact_law(FLAT))
    assert result.p_value < 1e-12
    assert result.variation > result.allowed


def test_chi_square_of_a_hand_computed_table():
    """χ² = 25/50 + 25/50 = 1 with one degree of freedom: P = erfc(√½) = 0.3173."""
    result = fit(np.array([45, 55]), np.array([0.5, 0.5]))
    assert result.p_value == pytest.approx(math.erfc(math.sqrt(0.5)), abs=1e-5)
    assert result.variation == pytest.approx(0.05)
