"""How far a drafter's path probabilities can be trusted, counted by depth and probability, and corrected.

A calibrated drafter's nodes of path probability p are accepted p of the time. Bins of equal width hold what happened
instead (Guo et al., arXiv 1706.04599 §3). All of it is data: it can be counted inside the jitted loop, with older
rounds forgotten, or over recorded rounds.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.policy_spec import ReliabilitySpec

BINS = 10
# As many nodes as a bin must have seen before it counts as much as the drafter's own word.
TRUST = 10.0
# Rounds that are taken for granted at each depth, and the share of them that accepted it.
ROUNDS, REACH = 4.0, 0.6


class Reliability(NamedTuple):
    """Sums over nodes by depth (1 first) and bin: how many, their probabilities, how many were accepted. And over
    rounds by depth: those that had accepted the level before and drafted this one, and those that accepted it."""

    seen: Float[Array, "P K"]
    claimed: Float[Array, "P K"]
    accepted: Float[Array, "P K"]
    tried: Float[Array, " P"]
    won: Float[Array, " P"]


def nothing_seen(depth: int) -> Reliability:
    """Before the first round: probabilities are believed, and each level is reached from the last one REACH of the
    time."""
    P = max(depth, 1)
    seen, claimed, accepted = (
        jnp.zeros((P, BINS)) for _ in range(3)
    )  # apart: a donated buffer may stand once
    tried, won = (jnp.full(P, value, jnp.float32) for value in (ROUNDS, ROUNDS * REACH))
    return Reliability(seen, claimed, accepted, tried, won)


def learned(spec: ReliabilitySpec, depth: int, weight: float = 200.0) -> Reliability:
    """What earlier rounds taught, worth at most `weight` nodes a bin and ROUNDS rounds a depth; deeper levels than
    were seen start as `nothing_seen`."""
    fresh = nothing_seen(depth)
    rows = min(depth, len(spec.tried))

    def first(values: Array, taught: Array) -> Array:
        return values.at[:rows].set(taught[:rows])

    sums = [jnp.asarray(s, jnp.float32) for s in (spec.seen, spec.claimed, spec.accepted)]
    shrink = jnp.minimum(1.0, weight / jnp.maximum(sums[0], 1.0))
    tried, won = (jnp.asarray(s, jnp.float32) for s in (spec.tried, spec.won))
    rate = (won + ROUNDS * REACH) / (tried + ROUNDS)
    return Reliability(
        *(first(a, s * shrink) for a, s in zip(fresh, sums)),
        tried=fresh.tried,
        won=first(fresh.won, rate * ROUNDS),
    )


def bin_of(probability: Float[Array, "*T"]) -> Int32[Array, "*T"]:
    """Which of the equal bins of [0, 1] holds a probability."""
    return jnp.clip((probability * BINS).astype(jnp.int32), 0, BINS - 1)


def bias(counts: Reliability) -> Float[Array, "P K"]:
    """Accepted less claimed, a node, in each bin; small where little was seen."""
    return (counts.accepted - counts.claimed) / (counts.seen + TRUST)


def reach(counts: Reliability) -> Float[Array, " P"]:
    """Chance that a level is accepted, given the one before."""
    return counts.won / jnp.maximum(counts.tried, 1e-6)


def corrected(
    bias: Float[Array, "P K"], score: Float[Array, "*T"], depth: Int32[Array, "*T"]
) -> Float[Array, "*T"]:
    """Acceptance rates of nodes with these log path probabilities; 0 for no node (−inf)."""
    probability = jnp.exp(score)
    row = jnp.clip(depth - 1, 0, bias.shape[0] - 1)
    rate = jnp.clip(probability + bias[row, bin_of(probability)], 0.0, 1.0)
    return jnp.where(score > -jnp.inf, rate, 0.0)


def count(
    before: Reliability,
    score: Float[Array, "B N"],
    depth: Int32[Array, "B N"],
    taken: Bool[Array, "B N"],
    accepted: Int32[Array, " B"],
    active: Bool[Array, " B"],
    forget: Float[Array, ""],
) -> Reliability:
    """One round added, earlier ones counting `forget` times as much: verified nodes (depth 0 and −inf are none), and
    how many levels of each row were accepted."""
    real = (depth > 0) & (score > -jnp.inf) & active[:, None]
    probability = jnp.where(real, jnp.exp(score), 0.0)
    P = before.tried.shape[0]
    row = jnp.where(real, depth - 1, P)
    place = row.reshape(-1), bin_of(probability).reshape(-1)

    def summed(old: Array, values: Array) -> Array:
        return (forget * old).at[place].add(values.reshape(-1).astype(jnp.float32), mode="drop")

    level = jnp.arange(1, P + 1)
    drafted = jnp.max(jnp.where(real, depth, 0), axis=1)[:, None] >= level
    tried = drafted & (accepted[:, None] >= level - 1)
    won = tried & (accepted[:, None] >= level)
    return Reliability(
        summed(before.seen, real),
        summed(before.claimed, probability),
        summed(before.accepted, real & taken),
        forget * before.tried + tried.sum(0),
        forget * before.won + won.sum(0),
    )


def expected_calibration_error(counts: Reliability) -> Float[Array, " P"]:
    """By depth: |claimed − accepted| a node, averaged over bins by the nodes they hold; 0 where nothing was seen."""
    gap = jnp.abs(counts.claimed - counts.accepted).sum(1)
    return gap / jnp.maximum(counts.seen.sum(1), 1.0)
