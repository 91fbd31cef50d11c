"""What a run was worth: acceptance, cost and speed, each under the one name that says how it was counted.

Per verify round s of a request: n_s drafted on the walked path (chain length or tree depth), a_s drafts
accepted, c_s tokens committed after the crop at a stop token or at the length limit. The prefill's own token
belongs to no round: it is in neither `tokens` nor `decode_s`, and its cost is the time to first token. Host
code, NumPy only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagle4.types import RoundInfo


class Rounds(NamedTuple):
    """The rounds of one request (or of several, pooled), int64 arrays of one length; a row per active round.

    `drafted_nodes` does not count the root, `verified_nodes` does: it is the bucket of rows the target
    computed.
    """

    drafted_depth: np.ndarray
    drafted_nodes: np.ndarray
    verified_nodes: np.ndarray
    num_accepted: np.ndarray
    num_committed: np.ndarray


def rounds_of(info: RoundInfo, row: int) -> Rounds:
    """Row `row` of a history of rounds (RoundInfo with a leading axis R), rounds it sat out dropped."""
    active = np.asarray(info.active)[:, row]

    def column(values) -> np.ndarray:
        values = np.asarray(values)
        return (values[:, row] if values.ndim == 2 else values)[active].astype(np.int64)

    return Rounds(*(column(getattr(info, name)) for name in Rounds._fields))


def predicted_of(info: RoundInfo, row: int) -> np.ndarray:
    """Predicted milliseconds of the rounds that row `row` took part in."""
    return np.asarray(info.predicted_ms, np.float64)[np.asarray(info.active)[:, row]]


def pool(requests: Sequence[Rounds]) -> Rounds:
    """All rounds of several requests as one record, so that every round weighs the same."""
    empty = np.zeros(0, np.int64)
    return (
        Rounds(*(np.concatenate((empty, *column)) for column in zip(*requests)))
        if requests
        else Rounds(*[empty] * 5)
    )


def ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else float("nan")


def tau(rounds: Rounds) -> float:
    """Acceptance length Σ(a_s + 1)/S: tokens per verify round, the target's own included, before cropping.

    NaN without rounds. EAGLE's τ (arXiv 2401.15077 §4), also called MAT or AL.
    """
    return ratio(np.sum(rounds.num_accepted + 1), len(rounds.num_accepted))


def tau_commit(rounds: Rounds) -> float:
    """Σc_s/S: tokens per round that the user received; below `tau` when a stop token or the limit cropped."""
    return ratio(np.sum(rounds.num_committed), len(rounds.num_committed))


def tau_per_request(requests: Sequence[Rounds]) -> float:
    """Unweighted mean of each request's own `tau`: short answers weigh as much as long ones."""
    values = [tau(r) for r in requests if len(r.num_accepted)]
    return float(np.mean(values)) if values else float("nan")


def histogram(rounds: Rounds) -> np.ndarray:
    """h[i] = rounds that accepted exactly i drafts, i = 0..max n_s."""
    return np.bincount(rounds.num_accepted, minlength=int(rounds.drafted_depth.max(initial=0)) + 1)


def joint_rate(rounds: Rounds) -> np.ndarray:
    """J_k = #(a_s ≥ k)/#(n_s ≥ k) at index k − 1, k = 1..max n_s: was the k-th draft of a path accepted?"""
    accepted, drafted, k = _by_position(rounds)
    return (accepted >= k).sum(1) / (drafted >= k).sum(1)


def conditional_rate(rounds: Rounds) -> np.ndarray:
    """C_k = #(a_s ≥ k)/#(a_s ≥ k − 1 and n_s ≥ k) at index k − 1: accepted, given that it was reached.

    NaN where no round reached k. At fixed depth J_k = ∏_{i≤k} C_i. EAGLE's n-α is this on a chain.
    """
    accepted, drafted, k = _by_position(rounds)
    reached = ((accepted >= k - 1) & (drafted >= k)).sum(1)
    hits = (accepted >= k).sum(1)
    return np.where(reached > 0, hits / np.maximum(reached, 1), np.nan)


def _by_position(rounds: Rounds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    depth = int(rounds.drafted_depth.max(initial=0))
    return rounds.num_accepted[None], rounds.drafted_depth[None], np.arange(1, depth + 1)[:, None]


def draft_acceptance_rate(rounds: Rounds) -> float:
    """Σa_s/Σn_s. It falls as the depth grows, so it must never rank depths. NaN if nothing was drafted."""
    return ratio(rounds.num_accepted.sum(), rounds.drafted_depth.sum())


def verification_yield(rounds: Rounds) -> float:
    """Σc_s/Σ(rows the target computed, root and bucket padding included): committed per verified row."""
    return ratio(rounds.num_committed.sum(), rounds.verified_nodes.sum())


def tau_from_joint(joint: np.ndarray) -> float:
    """τ = 1 + Σ J_k, exact when every round drafted the same depth."""
    return 1.0 + float(np.sum(joint))


def block_efficiency(alpha: float, depth: int) -> float:
    """Expected tokens per round for i.i.d. acceptance α: (1 − α^{K+1})/(1 − α) (arXiv 2211.17192 eq. 1)."""
    return float(sum(alpha**k for k in range(depth + 1)))


def walltime_factor(alpha: float, depth: int, draft_cost: float) -> float:
    """Predicted speed-up, block efficiency/(K·c + 1), c = draft step/target step (arXiv 2211.17192 thm. 3.8).

    Assumes that verifying costs one plain decode step, which is false at larger batch or context.
    """
    return block_efficiency(alpha, depth) / (depth * draft_cost + 1)


def check_identities(rounds: Rounds, tokens: int | None = None) -> None:
    """Raises ValueError naming the first identity that one request's rounds break.

    `tokens`, if given, is an independent count of the answer's tokens without the prefill's own. Check
    requests, not pools: in a pool the crop at the end of a request looks like one in mid-answer.
    """
    accepted, depth, committed = rounds.num_accepted, rounds.drafted_depth, rounds.num_committed

    def hold(condition: object, identity: str) -> None:
        if not condition:
            raise ValueError(f"metrics identity broken: {identity}")

    hold(len({len(column) for column in rounds}) == 1, "every column has one entry per round")
    hold(all((column >= 0).all() for column in rounds), "counts are never negative")
    hold((accepted <= depth).all(), "accepted ≤ drafted depth, so 0 ≤ rate ≤ 1")
    hold((depth <= rounds.drafted_nodes).all(), "drafted depth ≤ drafted nodes")
    hold((rounds.drafted_nodes < rounds.verified_nodes).all(), "drafted nodes + root ≤ verified nodes")
    counts = histogram(rounds)
    hold(counts.sum() == len(accepted), "histogram sums to rounds")
    hold(counts @ np.arange(len(counts)) == accepted.sum(), "Σ i·h[i] = accepted")
    hold((committed <= accepted + 1).all(), "committed ≤ accepted + 1")
    hold((committed[:-1] == accepted[:-1] + 1).all(), "only the last round is cropped")
    hold((committed >= 1).all(), "an active round commits at least one token")
    hold(tokens is None or committed.sum() == tokens, "committed tokens = Σ chunks")
    joint, conditional = joint_rate(rounds), conditional_rate(rounds)
    hold(((joint >= 0) & (joint <= 1)).all(), "0 ≤ joint rate ≤ 1")
    if len(accepted) and (depth == depth[0]).all():
        hold(np.isclose(tau(rounds), tau_from_joint(joint)), "τ = 1 + Σ joint rates at fixed depth")
        hold(np.allclose(joint, np.nan_to_num(conditional).cumprod()), "J_k = ∏ C_i at fixed depth")
