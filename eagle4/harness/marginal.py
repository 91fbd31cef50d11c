"""Price every guess: one level more, one node more, only if the expected tokens pay for the time.

A round commits A tokens and costs C. Throughput is E[A] / E[C], and the rule that maximises it maximises E[A] − τ·E[C]
at the τ it reaches (Dinkelbach, "On nonlinear fractional programming", 1967). Costs are counted in plain decode steps
of this batch and context, so that plain decoding has τ = 1 and τ is the speed-up.

    extend   while up to LOOK further levels, less what their steps cost, raise the best value of the line below;
             looking further than one level steps over a cost that rises in stairs
    budget   the n that maximises Σ_{i<n} P_i − τ·V(n), over the row counts the target is compiled for
    nothing  where even guesses that are all right would not pay
    rest     when drafting rounds have clearly earned less than plain decoding would have, draft nothing for a while;
             each failed trial doubles the while
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
# Drafting rounds start as if they had spent so many plain steps and earned so many tokens; after a rest, with less.
SPENT, EARNED = 8.0, 9.5
SPENT_AGAIN, EARNED_AGAIN = 2.0, 2.3


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
        opening = cost.at(costs.first, batch, context, 1) / plain_ms
        none = (state.rest > 0) | ~could_pay(price, opening)
        return state.sizes._replace(depth=jnp.where(none, 0, depth), price=price)

    return Policy(init, plan, extend, budget, update, priced=True)


def extend(
    plan: Plan,
    frontier: Float[Array, "B W"],
    depth: Int32[Array, ""],
    scores: Float[Array, "B M"],
    depths: Int32[Array, "B M"],
) -> Bool[Array, ""]:
    """Whether 1, 2, … LOOK levels more, at their best, are worth more than verifying what there is.

    What a set of nodes is worth: the most of E[A] − τ·V(n). A further level is expected to put one node under each
    frontier row, as likely as the row times how often that level was followed; it displaces less likely nodes.
    """
    price: Price = plan.price
    P, most = price.reach.shape[0], price.verify.shape[0] - 1
    bar = price.tau * (1.0 + price.rise * depth.astype(jnp.float32))
    here = trust.corrected(price.bias, frontier, jnp.broadcast_to(depth, frontier.shape))
    nodes = best(trust.corrected(price.bias, scores, depths), most)
    now = worth(price, plan, nodes, bar)
    pays = jnp.array(False)
    for levels in range(1, LOOK + 1):
        level = depth + levels
        follows = jnp.where(level <= P, price.reach[jnp.minimum(level, P) - 1], 0.0)
        here = here * follows
        nodes = best(jnp.concatenate([nodes, here], axis=1), most)
        pays |= (level <= P) & (worth(price, plan, nodes, bar) - bar * levels * price.step > now)
    return (depth < plan.depth) & pays


def budget(plan: Plan, scores: Float[Array, "B M"], depth: Int32[Array, "B M"]) -> Int32[Array, ""]:
    """The number of nodes, root counted, that maximises expected tokens less τ times the cost of verifying."""
    price: Price = plan.price
    nodes = best(trust.corrected(price.bias, scores, depth), price.verify.shape[0] - 1)
    return 1 + jnp.argmax(values(price, plan, nodes, price.tau)).astype(jnp.int32)


def best(rates: Float[Array, "B M"], most: int) -> Float[Array, "B N1"]:
    """The `most` largest acceptance rates of each row, largest first."""
    count = min(most, rates.shape[1])
    return lax.top_k(rates, count)[0] if count else rates[:, :0]


def values(
    price: Price, plan: Plan, rates: Float[Array, "B N1"], tau: Float[Array, ""]
) -> Float[Array, " N"]:
    """E[A] − τ·V(n) of verifying n = 1, 2, … nodes, in the mean of the active rows; −inf beyond plan.nodes."""
    n = 1 + rates.shape[1]
    tokens = jnp.cumsum(jax.vmap(mean, (1, None))(rates, price.active)) if n > 1 else jnp.zeros(0)
    value = jnp.concatenate([jnp.zeros(1), tokens]) - tau * price.verify[:n]
    return jnp.where(jnp.arange(n) < plan.nodes, value, -jnp.inf)


def worth(price: Price, plan: Plan, rates: Float[Array, "B N1"], tau: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.max(values(price, plan, rates, tau))


def could_pay(price: Price, opening: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether drafting would pay if every guess were right: a chain as deep as any, for its levels' and rows' price.

    Where it would not, as on a machine that is busy with many requests already, not even a trial is worth its opening.
    """
    P, N = price.reach.shape[0], price.verify.shape[0]
    levels = jnp.arange(1, P + 1)
    spent = opening + (levels - 1) * price.step + price.verify[jnp.minimum(levels, N - 1)] - 1.0
    return jnp.any((levels - price.tau * spent > 0) & (levels < N))


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
    fine = drafted & (earned > 1.1 * spent) & (spent > 2 * SPENT_AGAIN)
    longer = jnp.minimum(2 * state.next_rest, LONGEST_REST)
    return state._replace(
        acceptance=acceptance,
        earned=jnp.where(losing, EARNED_AGAIN, earned),
        spent=jnp.where(losing, SPENT_AGAIN, spent),
        rest=jnp.where(losing, state.next_rest, jnp.maximum(state.rest - 1, 0)),
        next_rest=jnp.where(losing, longer, jnp.where(fine, FIRST_REST, state.next_rest)),
    )


def mean(values: Float[Array, " B"], active: Bool[Array, " B"]) -> Float[Array, ""]:
    """Over the active rows."""
    return jnp.where(active, values, 0.0).sum() / jnp.maximum(active.sum(), 1)
