"""The best that any policy could have done on a recording, knowing what the target went on to say.

In every round it chooses how many levels to draft and how many nodes to verify, best scores first, so that the whole
answer takes the least time by the cost table. How far a policy is from it is what better decisions could still gain.
"""

from typing import NamedTuple

import numpy as np

from eagle4.harness import costs as cost
from eagle4.harness.costs import CostTable
from eagle4.replay import Tape, at_batch
from eagle4.specs import TreeSpec


class Walk(NamedTuple):
    """By answer [Q]: least total milliseconds, rounds it took, and levels and rows in all of them."""

    ms: np.ndarray
    rounds: np.ndarray
    levels: np.ndarray
    rows: np.ndarray


def best_walk(recorded: Tape, tree: TreeSpec, costs: CostTable, batch: int = 1) -> Walk:
    """Backwards over positions: V(i) = min over (levels, rows) of cost + V(i + accepted + 1), exactly."""
    costs, counts = at_batch(costs, batch), tree.row_counts()
    depth, match = np.asarray(recorded.depth), np.asarray(recorded.match)
    rank, length = np.asarray(recorded.rank), np.asarray(recorded.length)
    results = []
    for q in range(len(length)):
        accepted, bucket = reach(depth[q], match[q], rank[q], counts)
        ms = prices(costs, int(recorded.context[q]), tree, accepted.shape[1])
        results.append(backwards(accepted, bucket, ms, np.array(counts), int(length[q])))
    return Walk(*(np.array(column) for column in zip(*results)))


def reach(depth: np.ndarray, match: np.ndarray, rank: np.ndarray, counts: tuple[int, ...]):
    """Accepted levels and the bucket's number [P, L, C] for every choice of levels and of most rows."""
    limits = np.array(counts) - 1
    chosen = rank[:, :, None, :] < limits[:, None]
    accepted = np.where(chosen & match[:, None, None], depth[:, None, None], 0).max(-1)
    return accepted, np.searchsorted(counts, 1 + chosen.sum(-1))


def prices(costs: CostTable, context: int, tree: TreeSpec, levels: int) -> np.ndarray:
    """Milliseconds of a round [L, C] by levels and rows."""
    verify = np.array([float(cost.at(costs.verify, 1, context, n)) for n in tree.row_counts()])
    first, step = (
        float(cost.at(costs.first, 1, context, 1)),
        float(cost.at(costs.step, 1, context, tree.width)),
    )
    draft = np.array([0.0, *(first + step * level for level in range(levels - 1))])
    return draft[:, None] + verify


def backwards(
    accepted: np.ndarray, bucket: np.ndarray, ms: np.ndarray, counts: np.ndarray, length: int
) -> tuple[float, int, int, int]:
    """(ms, rounds, Σ levels, Σ rows) of the best walk along one answer."""
    levels = np.broadcast_to(np.arange(ms.shape[0])[:, None], ms.shape)
    best = np.zeros((length + accepted.max(initial=0) + 1, 4))
    for i in range(length - 2, -1, -1):
        after = best[i + 1 + accepted[i]]
        total = np.take_along_axis(ms, bucket[i], 1) + after[..., 0]
        place = np.unravel_index(np.argmin(total), total.shape)
        best[i] = after[place]
        best[i, 0] = total[place]
        best[i, 1:] += 1, levels[place], counts[bucket[i][place]]
    ms_, rounds, drafted, verified = best[0]
    return float(ms_), int(rounds), int(drafted), int(verified)
