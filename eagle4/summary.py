"""From measured requests to the rows of a result: pooled figures per method and category, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle4.metrics import (
    Rounds,
    check_identities,
    conditional_rate,
    draft_acceptance_rate,
    histogram,
    joint_rate,
    pool,
    ratio,
    tau,
    tau_commit,
    tau_per_request,
    verification_yield,
)

RESAMPLES = 2000


class Sample(NamedTuple):
    """One request under one method. `tokens` = Σ committed over its rounds (the prefill's own is not in it).

    `decode_s` is the wall time of those rounds, `prefill_s` the time to first token; compile time is in
    neither. `identical`: ids equal the plain decoder's, ties apart; None at T > 0. `ties`: positions where
    they part within the stated logit gap. `*_ms` are means per round of this request in the phased form, None
    if it was not timed. `turn` numbers the turns of one conversation. `predicted_ms`, a number a round, is what the
    cost table said; None without a table.
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
    predicted_ms: np.ndarray | None = None


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
    predicted_ms: float | None
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
        drafted_depth=_known(ratio(rounds.drafted_depth.sum(), num_rounds)),
        verified_nodes=_known(ratio(rounds.verified_nodes.sum(), num_rounds)),
        **{name: _phase(own, name) for name in ("draft_ms", "verify_ms", "commit_ms")},
        round_ms=_known(1e3 * ratio(seconds, num_rounds)),
        predicted_ms=_predicted(own),
        ttft_ms=1e3 * float(np.mean([s.prefill_s for s in own])),
        tokens_per_s=_known(ratio(sum(s.tokens for s in own), seconds)),
        speedup_vs_ar=speedup,
        speedup_low=low,
        speedup_high=high,
        greedy_identical=None if None in verdicts else all(verdicts),
        ties=sum(s.ties for s in own),
    )


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _predicted(samples: list[Sample]) -> float | None:
    """Mean predicted milliseconds a round; None unless a table priced every request."""
    priced = [s.predicted_ms for s in samples if s.predicted_ms is not None]
    if len(priced) < len(samples) or not priced:
        return None
    return _known(ratio(sum(float(p.sum()) for p in priced), sum(map(len, priced))))


def _phase(samples: list[Sample], name: str) -> float | None:
    """Mean milliseconds per round over the timed requests, each weighing as many rounds as it had."""
    timed = [(getattr(s, name), len(s.rounds.num_accepted)) for s in samples if getattr(s, name) is not None]
    return _known(ratio(sum(ms * n for ms, n in timed), sum(n for _, n in timed)))


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
