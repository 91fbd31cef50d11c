"""Price every guess: one level more, one node more, only if the expected tokens pay for the time.

A round commits A tokens and costs C. Throughput is E[A] / E[C], and the rule that maximises it maximises E[A] − τ·E[C]
at the τ it reaches (Dinkelbach, "On nonlinear fractional programming", 1967). Costs are counted in plain decode steps
of this batch and context, so that plain decoding has τ = 1 and τ is the speed-up.

    extend   while some number of further levels brings at least τ tokens per cost; looking LOOK levels ahead steps over
             a cost that rises in stairs
    budget   the n that maximises Σ_{i<n} P_i − τ·V(n), over the row counts the target is compiled for
    rest     when drafting rounds have earned less than plain decoding would have, draft nothing for a while; each
             failed trial doubles the while
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.harness import costs as cost
from eagle4.harness import reliability as trust
from eagle4.harness.policy import Policy, envelope
from eagle4.harness.reliability import Reliability
from eagle4.policy_spec import PolicySpec
from eagle4.specs import TreeSpec
from eagle4.types import Plan, RoundInfo

LOOK = 3
FIRST_REST, LONGEST_REST = 8, 64
# The run's own rate starts as if it had spent so many plain steps, and earned so many tokens.
SPENT, EARNED = 2.0, 3.0


class Marginal(NamedTuple):
    """Numbers of the rule (sizes, tau, rise, forget, online), and what the run has taught: acceptance, tokens earned
    per plain step spent in rounds that drafted, rounds still to rest, and how long the next rest is."""

    sizes: Plan
    tau: Float[Array, ""]
    rise: Float[Array, ""]
    forget: Float[Array, ""]
    online: Bool[Array, ""]
    acceptance: Reliability
    earned: Float[Array, ""]
    spent: Float[Array, ""]
    rest: Int32[Array, ""]
    next_rest: Int32[Array, ""]


class Price(NamedTuple):
    """A round's prices in plain decode steps of `plain_ms`: a draft step, and at entry n − 1 verifying n nodes.

    `bias` and `reach` say what acceptance to expect (harness.reliability).
    """

    active: Bool[Array, " B"]
    tau: Float[Array, ""]
    rise: Float[Array, ""]
    step: Float[Array, ""]
    verify: Float[Array, " N"]
    plain_ms: Float[Array, ""]
    bias: Float[Array, "P K"]
    reach: Float[Array, " P"]


def marginal(spec: PolicySpec, tree: TreeSpec) -> Policy:
    """The rule at the head of this file. Trees of draws get a depth from acceptance so far, the others decide as they
    grow."""
    counts = np.array(tree.row_counts())
    rounded = counts[np.searchsorted(counts, np.arange(1, tree.nodes + 1))]
    drawn = tree.kind == "sampled"

    def init() -> Marginal:
        known = spec.reliability
        return Marginal(
            sizes=envelope(spec, tree),
            tau=jnp.float32(spec.tau),
            rise=jnp.float32(spec.rise),
            forget=jnp.float32(spec.forget),
            online=jnp.array(spec.online),
            acceptance=trust.learned(known, tree.depth) if known else trust.nothing_seen(tree.depth),
            earned=jnp.float32(EARNED),
            spent=jnp.float32(SPENT),
            rest=jnp.int32(0),
            next_rest=jnp.int32(FIRST_REST),
        )

    def plan(state: Marginal, costs, active, context) -> Plan:
        batch = jnp.maximum(active.sum(), 1)
        plain_ms = cost.at(costs.verify, batch, context, 1)
        verify = jax.vmap(lambda n: cost.at(costs.verify, batch, context, n))(jnp.asarray(rounded))
        price = Price(
            active=active,
            tau=jnp.where(state.tau > 0, state.tau, jnp.maximum(state.earned / state.spent, 1.0)),
            rise=state.rise,
            step=cost.at(costs.step, batch, context, tree.width) / plain_ms,
            verify=verify / plain_ms,
            plain_ms=plain_ms,
            bias=trust.bias(state.acceptance),
            reach=trust.reach(state.acceptance),
        )
        depth = jnp.minimum(best_depth(price, tree), state.sizes.depth) if drawn else state.sizes.depth
        return state.sizes._replace(depth=jnp.where(state.rest > 0, 0, depth), price=price)

    return Policy(init, plan, extend, budget, update, priced=True)


def extend(plan: Plan, scores: Float[Array, "B W"], depth: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether the next 1, 2, … LOOK levels, at their best, bring τ tokens per cost, in the mean of the active rows.

    A level is expected to bring the probability that the frontier holds times how often it has been followed. Each
    level is taken to verify one node more than the chain so far.
    """
    price: Price = plan.price
    P, N = price.reach.shape[0], price.verify.shape[0]
    mass = trust.corrected(price.bias, scores, jnp.broadcast_to(depth, scores.shape)).sum(1)
    mass = mean(jnp.minimum(mass, 1.0), price.active)
    levels = jnp.arange(1, LOOK + 1)
    follows = jnp.where(depth + levels <= P, price.reach[jnp.minimum(depth + levels, P) - 1], 0.0)
    gain = mass * jnp.cumsum(jnp.cumprod(follows))
    # Entry d verifies the chain of d guesses under the root.
    verify = price.verify[jnp.minimum(depth + levels, N - 1)] - price.verify[jnp.minimum(depth, N - 1)]
    bar = price.tau * (1.0 + price.rise * depth.astype(jnp.float32))
    pays = gain >= bar * (levels * price.step + verify)
    return (depth < plan.depth) & jnp.any(pays & (follows > 0))


def budget(plan: Plan, scores: Float[Array, "B M"], depth: Int32[Array, "B M"]) -> Int32[Array, ""]:
    """The number of nodes, root counted, that maximises expected tokens less τ times the cost of verifying."""
    price: Price = plan.price
    most = min(price.verify.shape[0] - 1, scores.shape[1])
    rates = trust.corrected(price.bias, scores, depth)
    best = lax.top_k(rates, most)[0] if most else jnp.zeros((scores.shape[0], 0))
    tokens = jnp.cumsum(jax.vmap(mean, (1, None))(best, price.active))
    value = jnp.concatenate([jnp.zeros(1), tokens]) - price.tau * price.verify[: most + 1]
    allowed = jnp.arange(most + 1) < plan.nodes
    return 1 + jnp.argmax(jnp.where(allowed, value, -jnp.inf)).astype(jnp.int32)


def best_depth(price: Price, tree: TreeSpec) -> Int32[Array, ""]:
    """Depth of a tree of draws that acceptance so far calls best, at least 1: no score of this round is looked at."""
    P, N = price.reach.shape[0], price.verify.shape[0]
    depth = jnp.arange(1, P + 1)
    nodes = jnp.minimum(tree.children * (1 + (depth - 1) * tree.width), N - 1)
    tokens = jnp.cumsum(jnp.cumprod(price.reach))
    return 1 + jnp.argmax(tokens - price.tau * ((depth - 1) * price.step + price.verify[nodes])).astype(
        jnp.int32
    )


def update(state: Marginal, plan: Plan, info: RoundInfo) -> Marginal:
    """Learn from a round that drafted; count down a rest."""
    price: Price = plan.price
    drafted = info.levels > 0
    keep = jnp.where(drafted, state.forget, 1.0)
    counted = trust.count(
        state.acceptance, info.score, info.depth, info.taken, info.num_accepted, info.active, keep
    )
    learn = drafted & state.online
    acceptance = jax.tree.map(lambda new, old: jnp.where(learn, new, old), counted, state.acceptance)
    tokens = jnp.where(drafted, mean(info.num_accepted + 1.0, info.active), 0.0)
    spent = jnp.where(drafted, info.predicted_ms / price.plain_ms, 0.0)
    earned, spent = keep * state.earned + tokens, keep * state.spent + spent
    losing = drafted & (earned < spent)
    return state._replace(
        acceptance=acceptance,
        earned=earned,
        spent=spent,
        rest=jnp.where(losing, state.next_rest, jnp.maximum(state.rest - 1, 0)),
        next_rest=jnp.where(
            drafted,
            jnp.where(losing, jnp.minimum(2 * state.next_rest, LONGEST_REST), FIRST_REST),
            state.next_rest,
        ),
    )


def mean(values: Float[Array, " B"], active: Bool[Array, " B"]) -> Float[Array, ""]:
    """Over the active rows."""
    return jnp.where(active, values, 0.0).sum() / jnp.maximum(active.sum(), 1)
