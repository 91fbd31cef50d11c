"""Expected acceptance equals the enumeration of whole drafts; bounds equal a linear program; the app tells both."""

import json
import subprocess
import sys
from pathlib import Path

import exact_law as exact
import numpy as np
import pytest
from scipy.optimize import linprog

from eagle4 import conf
from eagle4.errors import BadInput
from eagle4.verify import VERIFIERS
from eagle4.verify import expected as ex
from experiments import verifiers

SCHEMES = {
    "point_mass": exact.top_picks,
    "rejection": exact.without_replacement,
    "multi_round": exact.independent,
    "k_sequential": exact.independent,
}


def random_pairs(count, vocab, seed, zeros=False):
    """Random pairs, q falling, the last token with q = 0; `zeros` empties more of both."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([0.7] * vocab, count), rng.dirichlet([0.7] * (vocab - 1), count)
    if zeros:
        p[:, ::2] = np.where(p[:, ::2] < 0.2, 0, p[:, ::2])
        q[:, ::2] = np.where(q[:, ::2] < 0.2, 0, q[:, ::2])
    return ex.compact(exact.normalise(p + 1e-12 * (not zeros)), np.pad(exact.normalise(q), ((0, 0), (0, 1))))


def drawn_for(name, pairs, count):
    rng = np.random.default_rng(0)
    if name == "point_mass":
        return ex.picks(pairs, count)
    return ex.draws(pairs, count, SCHEMES[name] is exact.independent, 10, rng)


def same_at_every_prefix(pairs, depth):
    """The first pair as tables that do not depend on the prefix."""
    vocab = pairs.p.shape[-1]
    return exact.Tables(
        *([np.broadcast_to(x[0], (vocab,) * (d + 1)) for d in range(depth + 1)] for x in (pairs.p, pairs.q))
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_tree_tokens_equal_the_enumeration_of_whole_drafts(name):
    pairs = random_pairs(1, 4, seed=1)
    accept = ex.rank_acceptance(VERIFIERS[name].law, pairs, drawn_for(name, pairs, 3), [1, 2, 3])
    for parents in exact.TREES.values():
        tables = same_at_every_prefix(pairs, 3)
        drafts = exact.enumerate_drafts(parents, tables, SCHEMES[name])
        outcome = exact.outcome_of_node_law(VERIFIERS[name].law, *exact.records(drafts, tables), drafts)
        expected = exact.expected_tokens(drafts, outcome)
        got = ex.tree_tokens(parents, {m: a[0] for m, a in accept.items()})
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_block_tokens_equal_the_enumeration_of_whole_drafts():
    pairs = random_pairs(1, 4, seed=2)
    tables = same_at_every_prefix(pairs, 3)
    drafts = exact.enumerate_drafts(exact.CHAIN, tables, exact.independent)
    outcome = exact.outcome_of_chain_law(VERIFIERS["block"].law, *exact.records(drafts, tables), drafts)
    got = ex.block_tokens(pairs, np.zeros((1, 3), int), 10, np.random.default_rng(0))
    np.testing.assert_allclose(got, exact.expected_tokens(drafts, outcome), atol=1e-6)


def linear_program(p, q, count, replace):
    """Largest P(Y among X1 … XK) over couplings of Y ~ p with the drawn children, as a linear program."""
    scheme = exact.independent if replace else exact.without_replacement
    tables = exact.Tables([p, np.full((len(p),) * 2, 1 / len(p))], [q, np.full((len(p),) * 2, 1 / len(p))])
    drafts = exact.enumerate_drafts((-1,) + (0,) * count, tables, scheme)
    size, vocab = len(drafts.weight), len(p)
    among = (drafts.tokens[:, 1:, None] == np.arange(vocab)).any(1)
    from_draft = np.kron(np.eye(size), np.ones(vocab))
    to_token = np.kron(np.ones(size), np.eye(vocab))
    limits = np.concatenate([drafts.weight, p])
    solved = linprog(-among.ravel().astype(float), A_ub=np.vstack([from_draft, to_token]), b_ub=limits)
    assert solved.success
    return -solved.fun


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_transport_bound_equals_the_linear_program(replace, zeros):
    pairs = random_pairs(12, 5, seed=3, zeros=zeros)
    for count in (1, 2, 3):
        bound = ex.transport_bound(pairs, ex.draws(pairs, count, replace, 10, np.random.default_rng(0)))
        optimum = [linear_program(p, q, count, replace) for p, q in zip(*pairs)]
        np.testing.assert_allclose(bound, optimum, atol=1e-7)
        if count == 1:
            np.testing.assert_allclose(bound, np.minimum(pairs.p, pairs.q).sum(-1), atol=1e-9)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_verifier_exceeds_its_bound_and_one_child_reaches_it(name):
    pairs = random_pairs(40, 6, seed=4)
    drawn = drawn_for(name, pairs, 3)
    accept = ex.rank_acceptance(VERIFIERS[name].law, pairs, drawn, [1, 3])
    bound = ex.transport_bound(pairs, drawn)
    assert (accept[3].sum(-1) <= bound + 1e-6).all()
    if name == "point_mass":
        np.testing.assert_allclose(accept[3].sum(-1), pairs.p[:, :3].sum(-1), atol=1e-6)
    else:
        np.testing.assert_allclose(accept[1][:, 0], np.minimum(pairs.p, pairs.q).sum(-1), atol=1e-6)


def test_neither_drawn_nor_picked_children_are_better_in_general():
    """Draws accept more when q is p; picks when q has p's order but is too flat, and p is peaked."""
    p = np.array([[0.9, 0.05, 0.03, 0.02]])
    for q, drawn_is_better in ((p, True), (exact.normalise(p**0.1), False)):
        pairs = ex.compact(p, q)
        tokens = {
            name: ex.rank_acceptance(VERIFIERS[name].law, pairs, drawn_for(name, pairs, 2), [2])[2].sum()
            for name in ("rejection", "point_mass")
        }
        assert (tokens["rejection"] > tokens["point_mass"] + 1e-2) == drawn_is_better
        assert (tokens["rejection"] < tokens["point_mass"] - 1e-2) != drawn_is_better


@pytest.mark.parametrize("replace", [False, True])
def test_sampled_drafts_estimate_the_enumerated_ones(replace, monkeypatch):
    pairs = random_pairs(3, 5, seed=5, zeros=True)
    law = VERIFIERS["multi_round" if replace else "rejection"].law
    listed = ex.rank_acceptance(law, pairs, ex.draws(pairs, 3, replace, 1, np.random.default_rng(0)), [3])[3]
    places = np.array([[0, 1, 2]])
    block = ex.block_tokens(pairs, places, 1, np.random.default_rng(0))
    monkeypatch.setattr(ex, "MOST_DRAFTS", 1)
    drawn = ex.draws(pairs, 3, replace, 4000, np.random.default_rng(0))
    assert drawn.tokens.shape == (3, 4000, 3)
    np.testing.assert_allclose(ex.rank_acceptance(law, pairs, drawn, [3])[3], listed, atol=0.03)
    sampled = ex.block_tokens(pairs, places, 4000, np.random.default_rng(0))
    np.testing.assert_allclose(sampled, block, atol=0.08)


def test_sampled_children_beyond_the_support_are_absent():
    pairs = ex.compact(np.full((1, 6), 1 / 6), np.array([[0.5, 0.3, 0.2, 0, 0, 0]]))
    drawn = ex.draws(pairs, 7, False, 50, np.random.default_rng(0))
    assert (np.sort(drawn.tokens[..., :3], axis=-1) == [0, 1, 2]).all()
    assert (drawn.tokens[..., 3:] == -1).all()
    assert ex.picks(pairs, 7).tokens.tolist() == [[[0, 1, 2, -1, -1, -1, -1]]]


def test_compact_merges_what_is_never_proposed():
    p = np.array([[0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    q = np.array([[0.0, 0.3, 0.0, 0.7], [0.5, 0.0, 0.5, 0.0]])
    pairs = ex.compact(p, q)
    np.testing.assert_allclose(pairs.p, [[0.4, 0.2, 0.4], [0.25, 0.25, 0.5]])
    np.testing.assert_allclose(pairs.q, [[0.7, 0.3, 0.0], [0.5, 0.5, 0.0]])


def run_app(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.verifiers", f"hydra.run.dir={folder}", *overrides]
    root = Path(verifiers.__file__).resolve().parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_app_on_recorded_pairs(tmp_path):
    p = np.array([[0.3, 0.5, 0.2], [0.3, 0.5, 0.2]])
    q = np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
    np.savez(tmp_path / "pairs.npz", p=p, q=q)
    overrides = (f"record={tmp_path / 'pairs.npz'}", "depth=2", "children=1", "parents=[-1,0,1]")
    done = run_app(tmp_path / "run", *overrides)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "run" / "verifiers.json").read_text())
    np.testing.assert_allclose(row["overlap"], 0.7)
    for name, rate in (("rejection", 0.7), ("point_mass", 0.3)):
        np.testing.assert_allclose(row["chain"][name], 1 + rate + rate**2, atol=1e-6)
        np.testing.assert_allclose(row["tree"][name], 1 + rate + rate**2, atol=1e-6)
        np.testing.assert_allclose(row["level"][name], 1 + rate, atol=1e-6)
    assert row["chain"]["block"] > row["chain"]["rejection"] + 1e-3
    np.testing.assert_allclose(row["level"]["bound, distinct draws"], 1.7, atol=1e-6)
    assert (tmp_path / "run" / "verifiers.png").read_bytes()[:4] == b"\x89PNG"
    assert "one level of 1 child" in done.stdout
    assert not list((tmp_path / "run").glob("*.part"))


def test_app_tells_bad_input_in_one_line(tmp_path):
    done = run_app(tmp_path / "run", "record=nowhere.npz")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == "error: record 'nowhere.npz' is no .npz with arrays p and q [pairs, vocabulary]"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vocab=1", "vocab must be at least 2"),
        ("children=0", "children must be at least 1"),
        ("concentration=[0.0]", "positive"),
        ("closeness=[1.5]", "0..1"),
        ("closeness=[]", "0..1"),
        ("sharpness=0", "sharpness"),
        ("parents=[-1,2,0]", "topological"),
    ],
)
def test_app_refuses(override, message):
    with pytest.raises(BadInput, match=message):
        verifiers.check(conf.compose("verifiers", [override]))


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([[0.5, 0.5]], [[0.5, 0.4]], "array q: .*renormalise"),
        ([[np.nan, 0.5]], [[0.5, 0.5]], "array p: .*NaN"),
        ([[0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]], "must be"),
        (np.full((1, 300), 1 / 300), np.full((1, 300), 1 / 300), "likeliest 256"),
    ],
)
def test_app_refuses_a_record(p, q, message, tmp_path):
    np.savez(tmp_path / "pairs.npz", p=np.array(p), q=np.array(q))
    with pytest.raises(BadInput, match=message):
        verifiers.read_record(tmp_path / "pairs.npz", 24)
