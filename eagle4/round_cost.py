"""What the parts of a round cost here: target and drafter timed in turn over batch, context and size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from eagle4.draft_cost import first_call, step_call
from eagle4.errors import BadInput
from eagle4.forward_cost import WARMUP, Point, Tell, check_positions, forward_calls
from eagle4.harness import costs
from eagle4.harness.clock import interleaved, median, spread
from eagle4.harness.costs import CostTable, Grid
from eagle4.harness.roofline import FED
from eagle4.methods import Method
from eagle4.specs import TreeSpec
from eagle4.target.load import Checkpoint


class Measured(NamedTuple):
    """A table, and by part how far the timings of each point spread (interquartile range over median)."""

    table: CostTable
    spread: dict[str, Float[np.ndarray, "NB NC NS"]]


def has_network(method: Method | None) -> bool:
    """Whether drafting takes a network, and so time of its own."""
    return method is not None and method.system.drafter.name == "eagle"


def lists_for(tree: TreeSpec, batch: Sequence[int], context: Sequence[int]) -> dict[str, list[int]]:
    """What to measure for a tree: the row counts its target passes run in, and widths up to its frontier's."""
    width = {2**i for i in range(tree.width.bit_length()) if 2**i < tree.width} | {tree.width}
    nodes = {1, *tree.row_counts()}
    return {
        name: sorted(set(values))
        for name, values in zip(("batch", "context", "nodes", "width"), (batch, context, nodes, width))
    }


def count(method: Method | None, lists: Mapping[str, Sequence[int]]) -> int:
    """How many calls there are."""
    sizes = len(lists["nodes"]) + (1 + len(lists["width"]) if has_network(method) else 0)
    return len(lists["batch"]) * len(lists["context"]) * sizes


def calls(
    model: Checkpoint, method: Method | None, lists: Mapping[str, Sequence[int]]
) -> dict[Point, Callable[[], Any]]:
    """What to time, in the order it is timed in, compiled when first called.

    verify: a forward pass of the target. first: FED committed rows through the drafter, and one row's head. step:
    layer and head over a frontier. All caches are in memory at once, so that all points can be timed in turn.
    """
    check_positions(model.spec, max(lists["context"]), max(lists["nodes"]))
    if has_network(method) and min(lists["context"]) < FED:
        raise BadInput(
            f"context must be at least {FED} to time a drafter network, got {min(lists['context'])}"
        )
    found: dict[Point, Callable[[], Any]] = {}
    for batch, context in ((b, c) for b in lists["batch"] for c in lists["context"]):
        forward = forward_calls(model, batch, context, list(lists["nodes"]))
        found |= {Point("verify", batch, context, n): call for n, call in forward.items()}
        if method is not None and has_network(method):
            network = method.params.drafter, method.system.drafter, context
            found[Point("first", batch, context, 1)] = first_call(*network, batch)
            for n in lists["width"]:
                found[Point("step", batch, context, n)] = step_call(*network, n, batch)
    return found


def measure(
    model: Checkpoint,
    method: Method | None,
    lists: Mapping[str, Sequence[int]],
    repeats: int,
    tell: Tell,
) -> Measured:
    """Time target and drafter over batch × context × nodes and width; all points take turns. `tell` hears each call.

    `lists` holds batch, context, nodes and width, increasing. Drafters without a network cost nothing.
    """
    return measured(interleaved(calls(model, method, lists), repeats, WARMUP, progress=tell))


def measured(seconds: Mapping[Point, Sequence[float]]) -> Measured:
    """The table of timings: medians, raised where noise made a larger size seem cheaper. Missing parts cost nothing."""
    parts = {part: _part(seconds, part) for part in CostTable._fields}
    table = CostTable(**{part: grid for part, (grid, _) in parts.items()})
    return Measured(table, {part: spreads for part, (_, spreads) in parts.items()})


def _part(seconds: Mapping[Point, Sequence[float]], part: str) -> tuple[Grid, np.ndarray]:
    mine = {point[1:]: samples for point, samples in seconds.items() if point.part == part}
    if not mine:
        return costs.free(), np.zeros((1, 1, 1))
    batch, context, size = (sorted(set(axis)) for axis in zip(*mine))

    def over(value: Callable[[Sequence[float]], float]) -> np.ndarray:
        return np.array([[[value(mine[b, c, n]) for n in size] for c in context] for b in batch])

    return costs.grid(batch, context, size, 1e3 * over(median)), over(spread)


def draft_rows(seconds: Mapping[Point, Sequence[float]]) -> list[dict[str, Any]]:
    """The drafter's timings as they were taken, in ms and as shares of a plain decode step."""
    return [
        {
            "part": point.part,
            "batch": point.batch,
            "context": point.context,
            "width": point.size,
            "ms": 1e3 * median(samples),
            "spread": spread(samples),
            "share": median(samples) / median(seconds[point._replace(part="verify", size=1)]),
        }
        for point, samples in seconds.items()
        if point.part != "verify"
    ]
