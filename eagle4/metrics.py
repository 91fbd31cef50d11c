"""What a run was worth: acceptance, cost and speed, each under the one name that says how it was counted.

Per verify round s of a request: n_s drafted on the walked path (chain length or tree depth), a_s drafts
accepted, c_s tokens committed after the crop at a stop token or at the length limit. The prefill's own token
belongs to no round: it is in neither `tokens` nor `decode_s`, and its cost is the time to first token. Host
code, NumPy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle4.types import RoundInfo

RESAMPLES = 2000


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


def pool(requests: Sequence[Rounds]) -> Rounds:
    """All rounds of several requests as one record, so that every round weighs the same."""
    empty = np.zeros(0, np.int64)
    return (
        Rounds(*(np.concatenate((empty, *column)) for column in zip(*requests)))
        if requests
        else Rounds(*[empty] * 5)
    )


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else float("nan")


def tau(rounds: Rounds) -> float:
    """Acceptance length Σ(a_s + 1)/S: tokens per verify round, the target's own included, before cropping.

    NaN without rounds. EAGLE's τ (arXiv 2401.15077 §4), also called MAT or AL.
    """
    return _ratio(np.sum(rounds.num_accepted + 1), len(rounds.num_accepted))


def tau_commit(rounds: Rounds) -> float:
    """Σc_s/S: tokens per round that the user received; below `tau` when a stop token or the limit cropped."""
    return _ratio(np.sum(rounds.num_committed), len(rounds.num_committed))


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
    return _ratio(rounds.num_accepted.sum(), rounds.drafted_depth.sum())


def verification_yield(rounds: Rounds) -> float:
    """Σc_s/Σ(rows the target computed, root and bucket padding included): committed per verified row."""
    return _ratio(rounds.num_committed.sum(), rounds.verified_nodes.sum())


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


class Sample(NamedTuple):
    """One request under one method. `tokens` = Σ committed over its rounds (the prefill's own is not in it).

    `decode_s` is the wall time of those rounds, `prefill_s` the time to first token; compile time is in
    neither. `identical`: ids equal the plain decoder's, ties apart; None at T > 0. `ties`: positions where
    they part within the stated logit gap. `*_ms` are means per round of this request in the phased form, None
    if it was not timed. `turn` numbers the turns of one conversation.
    """

    method: str
    prompt_id: str
    category: str
    prompt_tokens: int
    tokens: int
    decode_s: float
    prefill_s: float
    rounds: Rounds
    identical: bool | None = None
    ties: int = 0
    draft_ms: float | None = None
    verify_ms: float | None = None
    commit_ms: float | None = None
    turn: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the result: a method on a category (`all` = every category pooled).

    Throughput is Σ decode tokens/Σ decode seconds, prefill excluded; `speedup_vs_ar` is the ratio of those
    over the same prompts, with a 95 % paired bootstrap interval over prompts. None = not measured or not
    defined.
    """

    method: str
    category: str
    prompts: int
    prompt_tokens: int
    tokens: int
    rounds: int
    tau: float | None
    tau_commit: float | None
    tau_per_request: float | None
    histogram: list[int]
    joint: list[float]
    conditional: list[float | None]
    draft_acceptance_rate: float | None
    verification_yield: float | None
    drafted_depth: float | None
    verified_nodes: float | None
    draft_ms: float | None
    verify_ms: float | None
    commit_ms: float | None
    round_ms: float | None
    ttft_ms: float
    tokens_per_s: float | None
    speedup_vs_ar: float | None
    speedup_low: float | None
    speedup_high: float | None
    greedy_identical: bool | None
    ties: int


def summarise(samples: Sequence[Sample], baseline_samples: Sequence[Sample]) -> list[Row]:
    """Rows per method and category in order of first appearance, then `all`; checks all identities.

    `baseline_samples` are plain decoding on the same prompts (more is fine, none gives no speed-ups). Raises
    ValueError for a broken identity, a duplicate (method, prompt, turn) or a prompt the baseline lacks.
    """
    baseline = _by_key(baseline_samples)
    rows = []
    for method in dict.fromkeys(s.method for s in samples):
        own = [s for s in samples if s.method == method]
        for sample in _by_key(own).values():
            check_identities(sample.rounds, sample.tokens)
            if baseline and (sample.prompt_id, sample.turn) not in baseline:
                raise ValueError(
                    f"the baseline has no sample for prompt {sample.prompt_id!r}, turn {sample.turn}"
                )
        categories = list(dict.fromkeys(s.category for s in own))
        rows += [_row(method, c, [s for s in own if s.category == c], baseline) for c in categories]
        rows.append(_row(method, "all", own, baseline))
    return rows


def _by_key(samples: Sequence[Sample]) -> dict[tuple[str, int], Sample]:
    keyed = {(s.prompt_id, s.turn): s for s in samples}
    if len(keyed) != len(samples):
        raise ValueError("two samples of one method share a prompt_id and turn")
    return keyed


def _row(method: str, category: str, own: list[Sample], baseline: dict[tuple[str, int], Sample]) -> Row:
    requests = [s.rounds for s in own]
    rounds = pool(requests)
    num_rounds, seconds = len(rounds.num_accepted), sum(s.decode_s for s in own)
    others = [baseline[s.prompt_id, s.turn] for s in own] if baseline else []
    speedup, low, high = speedup_interval(own, others) if others else (None, None, None)
    verdicts = [s.identical for s in own]
    return Row(
        method=method,
        category=category,
        prompts=len({s.prompt_id for s in own}),
        prompt_tokens=sum(s.prompt_tokens for s in own),
        tokens=sum(s.tokens for s in own),
        rounds=num_rounds,
        tau=_known(tau(rounds)),
        tau_commit=_known(tau_commit(rounds)),
        tau_per_request=_known(tau_per_request(requests)),
        histogram=histogram(rounds).tolist(),
        joint=joint_rate(rounds).tolist(),
        conditional=[_known(c) for c in conditional_rate(rounds).tolist()],
        draft_acceptance_rate=_known(draft_acceptance_rate(rounds)),
        verification_yield=_known(verification_yield(rounds)),
        drafted_depth=_known(_ratio(rounds.drafted_depth.sum(), num_rounds)),
        verified_nodes=_known(_ratio(rounds.verified_nodes.sum(), num_rounds)),
        **{name: _phase(own, name) for name in ("draft_ms", "verify_ms", "commit_ms")},
        round_ms=_known(1e3 * _ratio(seconds, num_rounds)),
        ttft_ms=1e3 * float(np.mean([s.prefill_s for s in own])),
        tokens_per_s=_known(_ratio(sum(s.tokens for s in own), seconds)),
        speedup_vs_ar=speedup,
        speedup_low=low,
        speedup_high=high,
        greedy_identical=None if None in verdicts else all(verdicts),
        ties=sum(s.ties for s in own),
    )


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _phase(samples: list[Sample], name: str) -> float | None:
    """Mean milliseconds per round over the timed requests, each weighing as many rounds as it had."""
    timed = [(getattr(s, name), len(s.rounds.num_accepted)) for s in samples if getattr(s, name) is not None]
    return _known(_ratio(sum(ms * n for ms, n in timed), sum(n for _, n in timed)))


def speedup_interval(
    own: Sequence[Sample], baseline: Sequence[Sample], seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Ratio of pooled decode tokens/s over the same prompts, with a 95 % paired percentile bootstrap.

    `own[i]` and `baseline[i]` answer the same turn of the same prompt. Prompts are resampled with all their
    turns, which are not independent. None where undefined: no tokens or, for the interval, a single prompt.
    """
    ids = {prompt: i for i, prompt in enumerate(dict.fromkeys(s.prompt_id for s in own))}
    index = np.array([ids[s.prompt_id] for s in own])

    def totals(samples: Sequence[Sample]) -> np.ndarray:
        values = np.array([(s.tokens, s.decode_s) for s in samples], np.float64)
        return np.stack([np.bincount(index, values[:, j], len(ids)) for j in (0, 1)])

    ours, theirs = totals(own), totals(baseline)
    if min(ours.sum(1).min(), theirs.sum(1).min()) <= 0:
        return None, None, None
    if np.array_equal(ours, theirs):
        return 1.0, 1.0, 1.0
    point = _throughput(ours.sum(1)) / _throughput(theirs.sum(1))
    if len(ids) < 2:
        return float(point), None, None
    drawn = np.random.default_rng(seed).integers(0, len(ids), (RESAMPLES, len(ids)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _throughput(ours[:, drawn].sum(2)) / _throughput(theirs[:, drawn].sum(2))
    low, high = np.quantile(ratios[np.isfinite(ratios)], (0.025, 0.975))
    return float(point), float(low), float(high)


def _throughput(totals: np.ndarray) -> np.ndarray:
    return totals[0] / totals[1]
