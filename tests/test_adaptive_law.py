"""Law 2 for the whole adaptive system: two rounds, the policy's decisions included, enumerated.

Every draft of a round is made by the real drafting code from the uniforms that give it, accepted by the verifier's
own law, and told to the real policy, whose next plan shapes the second round. What comes out is the joint law of the
next tokens, which has to be the target's whatever the policy does, unless a decision looked at this round's draws.
"""

import functools
import zlib

import exact_law as ex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.drafters import tree_drafting
from eagle4.harness import costs, marginal
from eagle4.harness.policies import POLICIES
from eagle4.policy_spec import PolicySpec
from eagle4.specs import TreeSpec
from eagle4.tree.grow import Decide, prune
from eagle4.types import RoundInfo
from eagle4.verify.rejection import law as rejection

V, LENGTH = 3, 4
TREE = TreeSpec("sampled", depth=2, width=1, children=1, nodes=3, buckets=(1, 2, 3))
SPEC = PolicySpec("marginal", tau=1.0, forget=0.5)
POLICY = POLICIES["marginal"](SPEC, TREE)
ACTIVE = jnp.array([True])


def part(*ms):
    return costs.grid([1], [64], range(1, 1 + len(ms)), [[list(ms)]])


TABLE = costs.CostTable(part(10.0, 11.0, 13.0), part(2.0), part(1.0))


def table(prefix: tuple[int, ...], which: str) -> np.ndarray:
    """The next token's distribution after a text: the target's, or the drafter's, which is a blurred one."""
    p = np.random.default_rng(zlib.crc32(bytes(prefix))).dirichlet([0.8] * V) * 0.94 + 0.02
    if which == "p":
        return p
    return 0.6 * p + 0.4 * np.random.default_rng(zlib.crc32(bytes([9, *prefix]))).dirichlet([1] * V)


@functools.cache
def tables(prefix: tuple[int, ...]) -> ex.Tables:
    """Both for up to two more tokens."""

    def after(which, depth):
        found = np.zeros((V,) * (depth + 1))
        for more in np.ndindex(*(V,) * depth):
            found[more] = table((*prefix, *more), which)
        return found

    return ex.Tables(*([after(which, depth) for depth in range(3)] for which in "pq"))


@functools.cache
def plain(prefix: tuple[int, ...]) -> np.ndarray:
    """The target's joint law of what is missing to LENGTH tokens."""
    if len(prefix) == LENGTH:
        return np.ones(())
    return np.stack([table(prefix, "p")[t] * plain((*prefix, t)) for t in range(V)])


def uniforms_for(tokens):
    """depth -> uniforms whose noise makes the drawn token at that depth win."""
    wanted = jnp.where(jnp.arange(V) == tokens[:, None], 1 - 1e-7, 1e-30)
    return lambda depth: wanted[depth][None, None]


@functools.cache
def drafting(kind):
    """(tokens [B, 2], q after the prefix, q after one more token, plan) -> the drafts of those draws."""

    def one(tokens, q0, q1, plan):
        ids = jnp.arange(V, dtype=jnp.int32)

        def follow(carry, frontier):
            return jnp.broadcast_to(ids, (1, 1, V)), q1[frontier.tokens], carry

        tree_drafting.row_uniforms = lambda keys, width, size: uniforms_for(tokens)
        decide = Decide(POLICY.extend, POLICY.budget)
        root_q = ids[None], q0[None]
        return kind(TREE, follow, (), jnp.zeros(1, jnp.int32), root_q, None, plan, decide)[0]

    return jax.jit(jax.vmap(one, (0, None, None, None)))


def leaking(tree, follow, carry, root, root_q, keys, plan, decide):
    """Planted: a drawn token is verified only if its own score pays for it."""
    draft, carry = tree_drafting._sampled(tree, follow, carry, root, root_q, keys, plan, decide)
    return prune(draft, decide.budget(plan, draft.score[:, 1:], draft.depth[:, 1:])), carry


@functools.cache
def learn():
    return jax.jit(POLICY.update)


def told(draft, b, accepted):
    """What the policy hears of a round that accepted so many of draft b."""
    score = jnp.where(draft.candidate[b], draft.score[b], -jnp.inf)
    candidates = draft.candidate[b].sum(dtype=jnp.int32)
    return RoundInfo(
        active=ACTIVE,
        drafted_depth=candidates[None],
        drafted_nodes=candidates[None],
        verified_nodes=1 + candidates,
        num_accepted=jnp.array([accepted]),
        num_committed=jnp.array([accepted + 1]),
        levels=draft.levels[b],
        score=score,
        depth=draft.depth[b],
        taken=(jnp.arange(3) <= accepted)[None] & (jnp.arange(3) > 0),
        predicted_ms=costs.round_ms(TABLE, 1, 64, 1, draft.levels[b], 1 + candidates),
    )


def law(prefix, state, rounds, kind, depths) -> np.ndarray:
    """The joint law of the tokens missing to LENGTH after so many speculative rounds, then plain decoding."""
    if rounds == 0 or len(prefix) >= LENGTH:
        return plain(prefix)
    plan = planned(state)
    depths[rounds].add(int(plan.depth))
    mine = tables(prefix)
    drafts = ex.enumerate_drafts((-1, 0, 1), mine, ex.independent)
    made = drafting(kind)(jnp.asarray(drafts.tokens[:, 1:]), *map(jnp.asarray, mine.q[:2]), plan)
    made = jax.tree.map(np.asarray, made)
    live = made.candidate[:, 0]
    assert (made.tokens[:, 0][live] == drafts.tokens[live]).all()
    drafts = drafts._replace(candidate=live)
    p, draft = ex.records(drafts, mine)
    outcome = ex.outcome_of_node_law(rejection, p, draft, drafts)
    whole = np.zeros((V,) * (LENGTH - len(prefix)))
    for b, n in np.argwhere(outcome.stop > 0):
        after = learn()(state, plan, jax.tree.map(jnp.asarray, told(made, b, n)))
        for token in range(V):
            text = (*drafts.tokens[b, 1 : 1 + n].tolist(), token)
            chance = drafts.weight[b] * outcome.stop[b, n] * outcome.emitted[b, n, token]
            room = LENGTH - len(prefix)
            if len(text) >= room:
                whole[text[:room]] += chance
            elif chance > 0:
                whole[text] += chance * law((*prefix, *text), after, rounds - 1, kind, depths)
    return whole


@functools.cache
def plan_of():
    return jax.jit(lambda state: POLICY.plan(state, TABLE, ACTIVE, 64))


def planned(state):
    return plan_of()(state)


@pytest.fixture(autouse=True)
def quick_to_rest(monkeypatch):
    """A policy whose first failure already makes it rest; and the real uniforms again afterwards."""
    monkeypatch.setattr(tree_drafting, "row_uniforms", tree_drafting.row_uniforms)
    monkeypatch.setattr(marginal, "SPENT", 2.0)
    monkeypatch.setattr(marginal, "EARNED", 3.0)


def deviation(kind) -> tuple[float, dict[int, set[int]]]:
    depths = {1: set(), 2: set()}
    found = law((), POLICY.init(), 2, kind, depths)
    assert abs(found.sum() - 1) < 1e-6
    return float(np.abs(found - plain(())).max()), depths


def test_two_rounds_of_the_adaptive_system_follow_the_target_exactly():
    """The plan of the second round depends on what the first drew, down to drafting nothing."""
    off, depths = deviation(tree_drafting.KINDS["sampled"])
    assert off <= 1e-6
    assert depths == {2: {2}, 1: {0, 1, 2}}


def test_planted_a_decision_that_looks_at_the_drawn_token_fails():
    off, _ = deviation(leaking)
    assert off > 1e-3
