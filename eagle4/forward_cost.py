"""What a forward pass of the target costs here, over batch × context × nodes, beside the machine's limits."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eagle4 import decode
from eagle4.errors import BadInput
from eagle4.harness import hardware
from eagle4.harness.clock import interleaved, median, spread
from eagle4.harness.hardware import Limits, forward_limit_s, measured_limits
from eagle4.specs import ModelSpec
from eagle4.target import cache as kv
from eagle4.target.load import Checkpoint
from eagle4.types import KVCache

WARMUP = 2
# The two aims: eight rows at most this much above one row, and one row above the reading of its weights.
AIM = 1.6
# Beside the points: reading as many bytes as the weights have.
READ = "read"

Tell = Callable[[Any], None]


class Point(NamedTuple):
    """Something to time: a part of `costs.CostTable` at one batch, context and size."""

    part: str
    batch: int
    context: int
    size: int


def check_grid(given: dict[str, Any]) -> dict[str, list[int]]:
    """The four lists, sorted and each value once; refuses numbers that can't be measured."""
    lists = {}
    for name in ("batch", "context", "nodes", "width"):
        values = given[name]
        if not isinstance(values, list) or not values or any(type(v) is not int or v < 1 for v in values):
            raise BadInput(f"{name} must list whole numbers of at least 1, like {name}=[1,8]; got {values}")
        lists[name] = sorted(set(values))
    if lists["nodes"][-1] > 256:
        raise BadInput(f"nodes must lie in 1..256, got {lists['nodes'][-1]}")
    if lists["width"][-1] > 64:
        raise BadInput(f"width must lie in 1..64, got {lists['width'][-1]}")
    if lists["nodes"][0] != 1:
        raise BadInput("nodes must contain 1, the plain decode step that ratios are taken against")
    if type(given["repeats"]) is not int or given["repeats"] < 1:
        raise BadInput(f"repeats must be at least 1, got {given['repeats']}")
    return lists


def check_positions(spec: ModelSpec, context: int, nodes: int) -> None:
    if context + nodes > spec.max_position:
        raise BadInput(
            f"context {context} + nodes {nodes} exceeds the model's {spec.max_position} positions; lower one of them"
        )


def filled_cache(spec: ModelSpec, batch: int, context: int, dtype: Any) -> KVCache:
    """A full cache of random entries, an array of its own for every layer, as in decoding."""
    empty = kv.allocate(spec, batch, context, dtype)
    keys = iter(jax.random.split(jax.random.key(0), 2 * spec.num_layers))
    k, v = (tuple(jax.random.normal(next(keys), a.shape, dtype) for a in side) for side in (empty.k, empty.v))
    return KVCache(k=k, v=v, length=jnp.full(batch, context, jnp.int32))


def forward_calls(
    model: Checkpoint, batch: int, context: int, nodes: list[int]
) -> dict[int, Callable[[], Any]]:
    """By node count: a forward pass over a chain of random tokens after `context` committed ones."""
    spec, params = model.spec, model.params
    cache = filled_cache(spec, batch, context, params["embed"].dtype)

    def call(n: int) -> Callable[[], Any]:
        tokens = np.random.default_rng(n).integers(0, spec.vocab_size, (batch, n), np.int32)
        positions = np.broadcast_to(context + np.arange(n, dtype=np.int32), (batch, n))
        attend = np.broadcast_to(np.tri(n, dtype=bool), (batch, n, n))
        chain = tuple(map(jnp.asarray, (tokens, positions, attend)))
        return lambda: decode.jit_forward(params, spec, *chain, cache)

    return {n: call(n) for n in nodes}


def forward_rows(
    model: Checkpoint, limits: Limits, seconds: Mapping[Any, Sequence[float]]
) -> list[dict[str, Any]]:
    """Time, ratio to one node, and limit for every forward pass among `seconds`, by batch, context and nodes.

    `read_ms` is the median time of reading the weights' bytes, in turn with the forward passes.
    """
    itemsize = model.params["embed"].dtype.itemsize
    rows = []
    for point in (p for p in seconds if p != READ and p.part == "verify"):
        _, batch, context, n = point
        samples, base = seconds[point], median(seconds[point._replace(size=1)])
        limit = forward_limit_s(model.spec, batch * n, limits, context, batch, itemsize)
        rows.append(
            {
                "batch": batch,
                "context": context,
                "nodes": n,
                "rows": batch * n,
                "forward_ms": 1e3 * median(samples),
                "spread": spread(samples),
                "ratio": median(samples) / base,
                "read_ms": 1e3 * median(seconds[READ]),
                "limit_ms": 1e3 * limit,
                "over_limit": median(samples) / limit,
                "samples_ms": [1e3 * s for s in samples],
            }
        )
    return rows


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The two aims at every batch and context: value, and whether it is reached (None = not measured)."""
    found = []
    for one in (row for row in rows if row["nodes"] == 1):
        group = {r["nodes"]: r for r in rows if (r["batch"], r["context"]) == (one["batch"], one["context"])}
        values = {
            f"time(8)/time(1) ≤ {AIM}": group[8]["ratio"] if 8 in group else None,
            f"time(1) ≤ {AIM} × time to read the weights": one["forward_ms"] / one["read_ms"],
        }
        for name, value in values.items():
            reached = None if value is None else value <= AIM
            place = {"batch": one["batch"], "context": one["context"]}
            found.append({"target": name, **place, "value": value, "reached": reached})
    return found


def measure(
    model: Checkpoint, calls: Mapping[Point, Callable[[], Any]], repeats: int, console: Console
) -> tuple[Limits, dict[Any, list[float]], list[dict[str, Any]]]:
    """Limits, seconds of all `calls` and of READ, taken in turn, and (where `dense` has a choice) product times.

    All under one progress bar.
    """
    timed: dict[Any, Callable[[], Any]] = dict(calls)
    timed[READ] = hardware.reading(hardware.weight_bytes(model.params))
    nodes = sorted({point.size for point in calls if point.part == "verify"})
    with bar(console) as progress:

        def follow(what: str, total: int | None) -> Tell:
            task = progress.add_task(what, total=total)
            return lambda _: progress.advance(task)

        limits = measured_limits(model.params["embed"].dtype, progress=follow("limits", None))
        tell = follow("passes", (WARMUP + repeats) * len(timed))
        seconds, products = interleaved(timed, repeats, WARMUP, progress=tell), []
        if jax.default_backend() == "cpu":
            tell = follow("products", 2 * len(hardware.SHAPES) * (WARMUP + repeats) * len(nodes))
            products = hardware.product_times(model.params, nodes, repeats, WARMUP, progress=tell)
    return limits, seconds, products


def bar(console: Console) -> Progress:
    """A progress bar that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def warn_if_busy(console: Console) -> float | None:
    """The load average of the last minute; a warning when others use more than half of the machine."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        console.print(
            f"the machine is busy (load average {load:.1f} on {cores} cores); timings will be off",
            style="yellow",
        )
    return load
