"""Fit, train and compare candidate finders on a drafter's real states."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle4.errors import BadInput
from eagle4.retrieval.coverage import Coverage
from eagle4.retrieval.factors import Factors, truncated
from eagle4.specs import EagleSpec, RetrievalSpec
from eagle4.train import batches
from eagle4.train.batches import Batch
from eagle4.train.features import FeatureStore
from eagle4.train.head import HeadSpec, States, bands, covariance, optimiser
from eagle4.train.loop import rows_of
from eagle4.train.start import draft_vocabulary
from eagle4.train.step import jit_coverage, jit_covered, jit_head_update, jit_states

ROWS, LENGTH, AT_ONCE = 4, 512, 512
LISTS = (2048, 8192)
MISSED = 12

Told = Callable[[str, int, int], None]


def study(
    spec: EagleSpec,
    params: dict[str, Any],
    store: FeatureStore,
    counts: np.ndarray,
    retrieval: RetrievalSpec,
    head: HeadSpec,
    sizes: tuple[int, int, int],
    told: Told,
) -> tuple[Factors, list[dict[str, Any]]]:
    """The trained factors, and what each finder covers on held-out states: rows of what, top1, top_k, mass, states.

    `sizes`: states to fit on, held-out ones to judge by, depths to unroll. Finders: a fixed list of the most frequent
    tokens as long as the shortlist and as LISTS, plain SVD, SVD weighted by frequency, whitened SVD, and the last one
    trained; the trained one also by depth and by frequency band, the longest list by frequency band.
    """
    number, judged, steps = sizes
    fit = gather(params, spec, batches.training(store, LENGTH, ROWS), number, steps, told)
    test = gather(params, spec, batches.held_out(store, LENGTH, ROWS), judged, steps, told)
    W = np.asarray(params["head"])
    C = covariance(fit.state)
    rare = counts + 1.0
    fitted = truncated(W, retrieval.rank, C)
    finders = {
        "plain SVD": truncated(W, retrieval.rank),
        "SVD weighted by frequency": truncated(W, retrieval.rank, None, rare),
        "SVD whitened by the states": fitted,
    }
    trained = train(fitted, head, params["head"], fit.state, told)
    if head.steps:
        finders[f"whitened, then trained ({head.loss})"] = trained
    rows = []
    listed = None
    for size in sorted({retrieval.candidates, *(n for n in LISTS if n < len(counts))}):
        listed = fixed_list(params["head"], counts, size, test)
        rows.append(row(f"a fixed list of {size} frequent tokens", listed, np.ones(len(test.depth), bool)))
    assert listed is not None
    rows += by_frequency(listed, counts)
    judgement = None
    for name, factors in finders.items():
        judgement = judge(factors, params["head"], test.state, retrieval)
        rows.append(row(name, judgement, np.ones(len(test.depth), bool)))
    assert judgement is not None
    rows += [row(f"  step {j}", judgement, test.depth == j) for j in range(steps)]
    return trained, rows + by_frequency(judgement, counts)


def by_frequency(found: Coverage, counts: np.ndarray) -> list[dict[str, Any]]:
    """A finder's rows by how frequent the best token is; the last one has the tokens that were missed most often."""
    tokens = np.asarray(found.token)
    band = bands(counts, tokens)
    names = "the 256 most frequent", "up to 2048", "up to 8192", "rarer"
    rows = [row(f"  best token among {name}", found, band == i) for i, name in enumerate(names)]
    missed, often = np.unique(tokens[~np.asarray(found.top1, bool)], return_counts=True)
    rows[-1]["missed"] = missed[np.argsort(-often, kind="stable")][:MISSED].tolist()
    return rows


def gather(
    params: dict[str, Any], spec: EagleSpec, data: Iterator[Batch], number: int, steps: int, told: Told
) -> States:
    """`number` states of every depth alike, as far as the data reaches."""
    found: list[np.ndarray] = []
    depth: list[np.ndarray] = []
    have = 0
    for batch in data:
        states, real = (np.asarray(a) for a in jit_states(params, spec, rows_of(batch), steps))
        for j in range(steps):
            found.append(states[j][real[j]])
            depth.append(np.full(len(found[-1]), j, np.int32))
        have += int(real.sum())
        told("states", min(have, number), number)
        if have >= number:
            break
    if not have:
        raise BadInput(
            "the feature store has no held-out documents to judge factors by; capture more documents"
        )
    order = np.random.default_rng(0).permutation(have)[:number]
    return States(np.concatenate(found)[order], np.concatenate(depth)[order])


def train(factors: Factors, spec: HeadSpec, head: jax.Array, states: np.ndarray, told: Told) -> Factors:
    """`spec.steps` steps on random batches of states."""
    rng, opt_state = np.random.default_rng(spec.seed), optimiser(spec).init(factors)
    for step in range(spec.steps):
        chosen = jnp.asarray(states[rng.integers(0, len(states), spec.batch)])
        factors, opt_state, loss = jit_head_update(spec, factors, opt_state, head, chosen)
        told(f"training, loss {float(loss):.3f}" if step % 10 == 0 else "training", step + 1, spec.steps)
    return factors


def judge(factors: Factors, head: jax.Array, states: np.ndarray, retrieval: RetrievalSpec) -> Coverage:
    """Coverage of all states, a few at a time."""
    parts = [
        jit_coverage(factors, head, jnp.asarray(padded), retrieval.candidates, retrieval.selection)
        for padded in chunks(states)
    ]
    return whole(parts, len(states))


def fixed_list(head: jax.Array, counts: np.ndarray, size: int, test: States) -> Coverage:
    """FR-Spec's way (arXiv 2502.14856): the same frequent tokens for every state."""
    ids = jnp.asarray(draft_vocabulary(counts, size))
    parts = [jit_covered(ids, head, jnp.asarray(padded)) for padded in chunks(test.state)]
    return whole(parts, len(test.state))


def whole(parts: list[Coverage], number: int) -> Coverage:
    """The parts' first `number` states."""
    return jax.tree.map(lambda *part: jnp.concatenate(part)[:number], *parts)


def chunks(states: np.ndarray) -> Iterator[np.ndarray]:
    """`AT_ONCE` states at a time, the last ones filled up with zeros."""
    for i in range(0, len(states), AT_ONCE):
        part = states[i : i + AT_ONCE]
        yield np.pad(part, ((0, AT_ONCE - len(part)), (0, 0)))


def row(what: str, found: Coverage, chosen: np.ndarray) -> dict[str, Any]:
    """Means over the chosen states; NaN where there is none."""
    number = int(chosen.sum())
    means = {
        name: float(np.asarray(getattr(found, name))[chosen].mean()) if number else float("nan")
        for name in ("top1", "top_k", "mass")
    }
    return {"what": what, "states": number, **means}
