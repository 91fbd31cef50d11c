"""Law 2: the emitted text follows the target's distribution, enumerated; and planted bugs do not pass."""

import exact_law as ex
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.verify import VERIFIERS, NodeLaw
from eagle4.verify.point_mass import law as point_mass
from eagle4.verify.rejection import law as rejection

EXACT = 1e-6
BUG = 1e-3

# A point mass is exact for any drafts, drawn ones too: given the draft, the emitted token already follows p.
# Rejection passes over repeats: what is left of independent draws then are draws without replacement.
SCHEMES = {
    "point_mass": (ex.top_picks, ex.repeated_picks, ex.without_replacement),
    "rejection": (ex.without_replacement, ex.independent),
    "multi_round": (ex.independent,),
    "k_sequential": (ex.independent,),
}


def deviation(law, parents, tables, scheme, *, candidates=None, keep=None, believed=None):
    """max |law − target|. `keep` may drop candidates, `believed` replaces the q that the verifier is told."""
    drafts = ex.enumerate_drafts(parents, tables, scheme)
    if keep is not None:
        drafts = drafts._replace(candidate=keep(drafts))
    p, draft = ex.records(drafts, tables if believed is None else tables._replace(q=believed), candidates)
    return ex.deviation(drafts, tables, ex.outcome_of_node_law(law, p, draft, drafts))


def depth_of(parents):
    return max(len(ex.path(parents, n)) for n in range(len(parents)))


@pytest.mark.parametrize("kind", ex.KINDS)
@pytest.mark.parametrize("tree", ex.TREES)
@pytest.mark.parametrize(("name", "scheme"), [(n, s) for n, ss in SCHEMES.items() for s in ss])
def test_exact_law_of_node_verifiers(name, scheme, tree, kind):
    parents = ex.TREES[tree]
    tables = ex.make_tables(kind, 4, depth_of(parents), seed=len(kind))
    assert deviation(VERIFIERS[name].law, parents, tables, scheme) <= EXACT


@pytest.mark.parametrize("kind", ex.KINDS)
def test_exact_law_of_block_verification(kind):
    tables = ex.make_tables(kind, 4, 3, seed=len(kind))
    drafts = ex.enumerate_drafts(ex.CHAIN, tables, ex.independent)
    p, draft = ex.records(drafts, tables)
    outcome = ex.outcome_of_chain_law(VERIFIERS["block"].law, p, draft, drafts)
    assert ex.deviation(drafts, tables, outcome) <= EXACT


@pytest.mark.parametrize("name", ["rejection", "multi_round", "k_sequential"])
def test_exact_law_with_fewer_candidates_than_tokens(name):
    tables = ex.make_tables("sparse", 5, 2, seed=3)
    for scheme in SCHEMES[name]:
        assert deviation(VERIFIERS[name].law, ex.BINARY, tables, scheme, candidates=2) <= EXACT


@pytest.mark.parametrize("kind", ["one hot", "same one hot"])
def test_exact_law_of_greedy_verification(kind):
    tables = ex.make_tables(kind, 4, 2, seed=8)
    assert deviation(VERIFIERS["greedy"].law, ex.BINARY, tables, ex.without_replacement) <= EXACT


def test_exact_law_of_pruned_siblings():
    """Dropping the last-drawn child of a node, decided without looking at the draw, keeps the law."""
    tables = ex.make_tables("random", 4, 2, seed=4)

    def last_child_only_where_q_is_flat(drafts):
        flat = ex.at_prefix(tables.q, drafts.tokens, [1]).max(-1) < 0.5
        return drafts.candidate & np.where(np.arange(7) == 4, flat[:, None], True)

    keep = last_child_only_where_q_is_flat
    assert deviation(rejection, ex.BINARY, tables, ex.without_replacement, keep=keep) <= EXACT


def test_exact_law_holds_for_the_shorter_of_two_chains():
    """Block verification where some chains stop after one token, decided by the next q before it is drawn
    from.
    """
    tables = ex.make_tables("random", 4, 3, seed=5)
    drafts = ex.enumerate_drafts(ex.CHAIN, tables, ex.independent)
    sharpest = ex.at_prefix(tables.q, drafts.tokens, [1]).max(-1)
    short = sharpest < np.median(sharpest)
    assert 0 < short.mean() < 1
    drafts.candidate[short, 2:] = False
    p, draft = ex.records(drafts, tables)
    outcome = ex.outcome_of_chain_law(VERIFIERS["block"].law, p, draft, drafts)
    assert ex.deviation(drafts, tables, outcome) <= EXACT


def test_block_verification_accepts_at_least_as_much_as_token_by_token():
    """arXiv 2403.10444, theorem 2; for one token both are 1 + Σ min(p, q)."""
    for depth in (1, 3):
        tables = ex.make_tables("random", 4, depth, seed=6)
        drafts = ex.enumerate_drafts(ex.CHAIN[: depth + 1], tables, ex.independent)
        p, draft = ex.records(drafts, tables)
        block = ex.expected_tokens(drafts, ex.outcome_of_chain_law(VERIFIERS["block"].law, p, draft, drafts))
        token = ex.expected_tokens(drafts, ex.outcome_of_node_law(rejection, p, draft, drafts))
        if depth == 1:
            closed = 1 + np.minimum(tables.p[0], tables.q[0]).sum()
            np.testing.assert_allclose([block, token], closed, atol=1e-6)
        else:
            assert block > token + 1e-2


def one_level(p, q, seed=0):
    """Tables with a given first distribution and random ones after it."""
    tables = ex.make_tables("random", len(p), 1, seed)
    return ex.Tables([np.array(p), tables.p[1]], [np.array(q), tables.q[1]])


def first_token_law(law, parents, tables, scheme):
    """Marginal law of the first token."""
    return law_of_first_token(law, tables, ex.enumerate_drafts(parents, tables, scheme))


def law_of_first_token(law, tables, drafts):
    """The same for drafts that may have been made under other tables."""
    p, draft = ex.records(drafts, tables)
    return ex.sequence_law(drafts, tables, ex.outcome_of_node_law(law, p, draft, drafts)).sum(-1)


def test_golden_a3_argmax_draft_with_softmax_ratio():
    tables = one_level([0.3, 0.5, 0.2], [0.6, 0.3, 0.1])
    wrong = first_token_law(rejection, (-1, 0), tables, ex.top_picks)
    np.testing.assert_allclose(wrong, [0.5, 1 / 3, 1 / 6], atol=1e-6)
    right = first_token_law(rejection, (-1, 0), tables, ex.independent)
    np.testing.assert_allclose(right, [0.3, 0.5, 0.2], atol=1e-6)
    half = ex.Tables(*([ex.normalise(x**2) for x in table] for table in tables))
    drafts = ex.enumerate_drafts((-1, 0), tables, ex.independent)
    other = law_of_first_token(rejection, half, drafts)
    np.testing.assert_allclose(0.5 * np.abs(other - half.p[0]).sum(), 0.059, atol=5e-4)


def without_zeroing(p, tokens, valid, ids, probs):
    """Planted: siblings are tried against the full p, and so is the residual."""
    chance = jnp.where(valid, jnp.take_along_axis(p, jnp.where(valid, tokens, 0), axis=-1), 0.0)
    refused = jnp.cumprod(1 - chance, axis=-1)
    reach = jnp.concatenate([jnp.ones_like(refused[:, :1]), refused[:, :-1]], axis=-1)
    return NodeLaw(reach * chance, p)


def given_children(*tokens):
    """A scheme that proposes these tokens, for certain."""
    return lambda q, elders: ex.one_hot(np.full(len(q), tokens[elders.shape[1]]), q.shape[-1])


def test_golden_a5_siblings():
    p = [0.5, 0.3, 0.15, 0.05]
    tables = one_level(p, p)
    for children in ((1, 0), (1, 1)):
        right = first_token_law(point_mass, (-1, 0, 0), tables, given_children(*children))
        np.testing.assert_allclose(right, p, atol=1e-6)
    drafts = ex.enumerate_drafts((-1, 0, 0), tables, given_children(1, 0))
    outcome = ex.outcome_of_node_law(point_mass, *ex.records(drafts, tables), drafts)
    np.testing.assert_allclose(1 - outcome.stop[0, 0], 0.8, atol=1e-6)
    wrong = first_token_law(without_zeroing, (-1, 0, 0), tables, given_children(1, 0))
    np.testing.assert_allclose(wrong, [0.525, 0.405, 0.0525, 0.0175], atol=1e-6)
    wrong = first_token_law(without_zeroing, (-1, 0, 0), tables, given_children(1, 1))
    np.testing.assert_allclose(wrong, [0.245, 0.657, 0.0735, 0.0245], atol=1e-6)


def test_golden_a6_acceptance_rates():
    """p/q of A3: .70 by rejection of sampled drafts, .30 by a point mass on the drafter's argmax."""
    tables = one_level([0.3, 0.5, 0.2], [0.6, 0.3, 0.1])
    for law, scheme, rate in ((rejection, ex.independent, 0.7), (point_mass, ex.top_picks, 0.3)):
        drafts = ex.enumerate_drafts((-1, 0), tables, scheme)
        outcome = ex.outcome_of_node_law(law, *ex.records(drafts, tables), drafts)
        np.testing.assert_allclose(ex.expected_tokens(drafts, outcome) - 1, rate, atol=1e-6)


def test_golden_a8_token_outside_the_nucleus_is_never_emitted():
    tables = one_level([2 / 3, 1 / 3, 0.0], [0.2, 0.2, 0.6])
    for name, schemes in SCHEMES.items():
        for scheme in schemes:
            law = first_token_law(VERIFIERS[name].law, (-1, 0, 0), tables, scheme)
            assert law[2] == 0
            np.testing.assert_allclose(law, [2 / 3, 1 / 3, 0], atol=1e-6)


def scaled(law):
    """Planted: acceptance 2 % too high."""

    def planted(*args):
        take, residual = law(*args)
        return NodeLaw(jnp.minimum(take * 1.02, 1.0), residual)

    return planted


def residual_is_p(law):
    """Planted: the token after a refusal comes from p itself."""
    return lambda p, *rest: NodeLaw(law(p, *rest).take, p)


def unequal_threshold(p, tokens, valid, ids, probs):
    """Planted: k-sequential selection with γ = 1, which accepts too much."""
    dense = jnp.zeros_like(p).at[jnp.arange(len(p))[:, None], ids].add(probs)
    drawn = jnp.where(valid, tokens, 0)
    ratio = jnp.minimum(jnp.take_along_axis(p / dense, drawn, -1), 1.0)
    accept = jnp.where(valid, ratio, 0.0)
    refused = jnp.cumprod(1 - accept, axis=-1)
    reach = jnp.concatenate([jnp.ones_like(refused[:, :1]), refused[:, :-1]], axis=-1)
    beta = jnp.minimum(p, dense).sum(-1, keepdims=True)
    tries = (1 - (1 - beta) ** valid.sum(-1, keepdims=True)) / beta
    return NodeLaw(reach * accept, jnp.maximum(p - tries * jnp.minimum(p, dense), 0.0))


def only_likely_draws(drafts):
    """Planted: a drawn token is verified only if the drafter thought it likely."""
    tables = ex.make_tables("random", 4, 3, seed=1)
    keep = drafts.candidate.copy()
    for node in range(1, 4):
        q = ex.at_prefix(tables.q, drafts.tokens, list(range(1, node)))
        likely = q[np.arange(len(q)), drafts.tokens[:, node]] > 0.3
        keep[:, node] &= likely & (keep[:, node - 1] if node > 1 else True)
    return keep


PLANTED = {
    "accept x 1.02": (scaled(rejection), (-1, 0), ex.independent, {}),
    "accept x 1.02, picks": (scaled(point_mass), (-1, 0), ex.top_picks, {}),
    "residual = p": (residual_is_p(rejection), ex.CHAIN, ex.independent, {}),
    "residual = p, siblings": (residual_is_p(point_mass), ex.BINARY, ex.top_picks, {}),
    "no zero-and-renormalise": (without_zeroing, ex.BINARY, ex.top_picks, {}),
    "repeated siblings tried twice": (without_zeroing, ex.BINARY, ex.repeated_picks, {}),
    "argmax drafts, softmax q": (rejection, ex.CHAIN, ex.top_picks, {}),
    "inclusion by the drawn token": (rejection, ex.CHAIN, ex.independent, {"keep": only_likely_draws}),
    "siblings distinct, q with": (VERIFIERS["multi_round"].law, ex.BINARY, ex.without_replacement, {}),
    "k-sequential at threshold 1": (unequal_threshold, ex.UNEQUAL, ex.independent, {}),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_fails_the_exact_law(bug):
    law, parents, scheme, options = PLANTED[bug]
    tables = ex.make_tables("random", 4, depth_of(parents), seed=1)
    assert deviation(law, parents, tables, scheme, **options) > BUG


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_planted_q_of_another_temperature_fails_the_exact_law(power):
    tables = ex.make_tables("random", 4, 3, seed=1)
    believed = [ex.normalise(q**power) for q in tables.q]
    assert deviation(rejection, ex.CHAIN, tables, ex.independent, believed=believed) > BUG


def test_planted_block_rule_in_node_by_node_order_fails_the_exact_law():
    """Planted: stopping at the first refusal with the acceptance probabilities of block verification."""
    tables = ex.make_tables("random", 4, 3, seed=1)
    drafts = ex.enumerate_drafts(ex.CHAIN, tables, ex.independent)
    p, draft = ex.records(drafts, tables)
    outcome = ex.outcome_of_chain_law(VERIFIERS["block"].law, p, draft, drafts)
    none_later = np.cumsum(outcome.stop, axis=1)
    longer = np.divide(outcome.stop, none_later, out=np.zeros_like(none_later), where=none_later > 0)
    refuse = np.pad(1 - longer[:, 1:], ((0, 0), (0, 1)), constant_values=1.0)
    reach = np.cumprod(np.pad(longer[:, 1:], ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    planted = outcome._replace(stop=reach * refuse)
    np.testing.assert_allclose(planted.stop.sum(-1), 1, atol=1e-6)
    assert ex.deviation(drafts, tables, planted) > BUG
