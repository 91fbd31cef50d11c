"""What a forward pass of the target costs on this machine, and how far that is from what the machine can do.

    python -m experiments.calibrate model=smollm2_135m nodes=[1,2,4,8]

Prints a table per batch and context, and leaves calibrate.json and calibrate.png in the run's folder.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eagle4 import conf, decode, tracking
from eagle4.errors import BadInput
from eagle4.fingerprint import device_fingerprint
from eagle4.harness import hardware
from eagle4.harness.clock import interleaved, median, spread
from eagle4.harness.hardware import Limits, forward_limit_s, measured_limits, weight_bytes
from eagle4.report import COLOURS, plain, write_atomic
from eagle4.specs import ModelSpec
from eagle4.target import cache as kv
from eagle4.target.hub import fetch
from eagle4.target.load import Checkpoint, load
from eagle4.types import KVCache

WARMUP = 2
# The two aims: eight rows at most this much above one row, and one row above the reading of its weights.
AIM = 1.6

Tell = Callable[[Any], None]


def check(config: DictConfig) -> dict[str, list[int]]:
    """The three lists, sorted and each value once; refuses numbers that can't be measured."""
    given, lists = conf.to_plain(config), {}
    for name in ("batch", "context", "nodes"):
        values = given[name]
        if not isinstance(values, list) or not values or any(type(v) is not int or v < 1 for v in values):
            raise BadInput(f"{name} must list whole numbers of at least 1, like {name}=[1,8]; got {values}")
        lists[name] = sorted(set(values))
    if lists["nodes"][-1] > 256:
        raise BadInput(f"nodes must lie in 1..256, got {lists['nodes'][-1]}")
    if lists["nodes"][0] != 1:
        raise BadInput("nodes must contain 1, the plain decode step that ratios are taken against")
    if type(config.repeats) is not int or config.repeats < 1:
        raise BadInput(f"repeats must be at least 1, got {config.repeats}")
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
    model: Checkpoint, limits: Limits, batch: int, context: int, nodes: list[int], repeats: int, tell: Tell
) -> list[dict[str, Any]]:
    """Time, ratio to one node, and limit for every node count at one batch and context."""
    seconds = interleaved(forward_calls(model, batch, context, nodes), repeats, WARMUP, progress=tell)
    itemsize = model.params["embed"].dtype.itemsize
    base = median(seconds[1])
    rows = []
    for n in nodes:
        limit = forward_limit_s(model.spec, batch * n, limits, context, batch, itemsize)
        rows.append(
            {
                "batch": batch,
                "context": context,
                "nodes": n,
                "rows": batch * n,
                "forward_ms": 1e3 * median(seconds[n]),
                "spread": spread(seconds[n]),
                "ratio": median(seconds[n]) / base,
                "limit_ms": 1e3 * limit,
                "over_limit": median(seconds[n]) / limit,
                "samples_ms": [1e3 * s for s in seconds[n]],
            }
        )
    return rows


def targets(rows: list[dict[str, Any]], read_ms: float) -> list[dict[str, Any]]:
    """The two aims at every batch and context: value, and whether it is reached (None = not measured)."""
    found = []
    for one in (row for row in rows if row["nodes"] == 1):
        group = {r["nodes"]: r for r in rows if (r["batch"], r["context"]) == (one["batch"], one["context"])}
        values = {
            f"time(8)/time(1) ≤ {AIM}": group[8]["ratio"] if 8 in group else None,
            f"time(1) ≤ {AIM} × weight bytes / bandwidth": one["forward_ms"] / read_ms,
        }
        for name, value in values.items():
            reached = None if value is None else value <= AIM
            place = {"batch": one["batch"], "context": one["context"]}
            found.append({"target": name, **place, "value": value, "reached": reached})
    return found


def measure(
    model: Checkpoint, lists: dict[str, list[int]], repeats: int, log: Tell, console: Console
) -> tuple[Limits, list[dict[str, Any]], list[dict[str, Any]]]:
    """Limits, forward rows and (where `dense` has a choice) product times, under one progress bar."""
    nodes = lists["nodes"]
    calls = (WARMUP + repeats) * len(nodes)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:

        def follow(what: str, total: int | None) -> Tell:
            task = bar.add_task(what, total=total)
            return lambda _: bar.advance(task)

        limits = measured_limits(model.params["embed"].dtype, progress=follow("limits", None))
        rows, products = [], []
        for batch, context in ((b, c) for b in lists["batch"] for c in lists["context"]):
            tell = follow(f"batch {batch}, context {context}", calls)
            group = forward_rows(model, limits, batch, context, nodes, repeats, tell)
            for row in group:
                log({key: value for key, value in row.items() if key != "samples_ms"})
            rows += group
        if jax.default_backend() == "cpu":
            tell = follow("products", 2 * len(hardware.SHAPES) * calls)
            products = hardware.product_times(model.params, nodes, repeats, WARMUP, progress=tell)
    return limits, rows, products


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Forward passes per batch and context, the two orientations, and the aims."""
    forward, products = result["forward"], result["products"]
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in forward):
        titles = ("nodes", "rows", "ms", "spread", "time(T)/time(1)", "limit ms", "time/limit")
        table = grid(f"forward pass, batch {batch}, context {context}", titles)
        for r in (row for row in forward if (row["batch"], row["context"]) == (batch, context)):
            figures = (f"{r['forward_ms']:.1f}", f"{r['spread']:.0%}", f"{r['ratio']:.2f}")
            limit = (f"{r['limit_ms']:.1f}", f"{r['over_limit']:.2f}")
            table.add_row(str(r["nodes"]), str(r["rows"]), *figures, *limit)
        console.print(table)
    if products:
        nodes = list(dict.fromkeys(row["rows"] for row in products))
        table = grid(
            "weights as the left operand: time of the ordinary product / time of dense",
            ("weights", *map(str, nodes)),
        )
        for kind, shape in dict.fromkeys((row["weights"], tuple(row["shape"])) for row in products):
            table.add_row(f"{kind} {shape[0]}×{shape[1]}", *(gain(products, n, kind) for n in nodes))
        table.add_row("all", *(gain(products, n) for n in nodes))
        console.print(table)
    table = grid("aims", ("aim", "batch", "context", "measured", "reached"))
    for t in result["targets"]:
        value = "–" if t["value"] is None else f"{t['value']:.2f}"
        reached = {None: "not measured", True: "yes", False: "no"}[t["reached"]]
        table.add_row(t["target"], str(t["batch"]), str(t["context"]), value, reached)
    console.print(table)


def grid(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 and name in ("weights", "aim") else "right")
    return table


def gain(products: list[dict[str, Any]], rows: int, kind: str | None = None) -> str:
    """Ordinary time over that of `dense`, for one shape or for all weights together."""
    mine = [row for row in products if row["rows"] == rows and kind in (None, row["weights"])]
    return f"{sum(row['ordinary_ms'] for row in mine) / sum(row['dense_ms'] for row in mine):.2f}"


def plot(forward: list[dict[str, Any]], path: Path) -> None:
    """Time over that of one node against nodes, a panel per batch; the machine's limit in the same unit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = list(dict.fromkeys(row["batch"] for row in forward))
    figure = Figure(figsize=(1.2 + 4.6 * len(batches), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axes, batch in zip(panels, batches):
        mine = [row for row in forward if row["batch"] == batch]
        for i, context in enumerate(dict.fromkeys(row["context"] for row in mine)):
            line = [row for row in mine if row["context"] == context]
            nodes, colour = [row["nodes"] for row in line], COLOURS[1 + i % (len(COLOURS) - 1)]
            axes.plot(nodes, [row["ratio"] for row in line], "o-", color=colour, label=f"context {context}")
            limits = [row["limit_ms"] / line[0]["forward_ms"] for row in line]
            axes.plot(nodes, limits, "--", color=colour, linewidth=1, label=f"limit, context {context}")
        axes.plot([8], [AIM], marker="v", color="black", linestyle="none", label=f"aim: {AIM} at 8")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["nodes"] for row in mine}), sorted({row["nodes"] for row in mine}))
        axes.set_ylim(bottom=0)
        axes.set_title(f"batch {batch}", fontsize=9, loc="left")
        axes.set_xlabel("nodes")
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("time, in plain decode steps (1 node)")
    panels[0].legend(frameon=False, fontsize=8)
    part = path.with_suffix(".part")
    figure.savefig(part, dpi=160, format="png")
    part.replace(path)


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


def main(config: DictConfig) -> None:
    lists, source, console = check(config), conf.build(config.model), Console()
    busy = warn_if_busy(console)
    model = load(fetch(source.source), source.dtype)
    check_positions(model.spec, lists["context"][-1], lists["nodes"][-1])
    folder, job = conf.output()
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        limits, forward, products = measure(model, lists, config.repeats, run.log, console)
        read = weight_bytes(model.params)
        result = {
            "model": source.source,
            "device": device_fingerprint(source.dtype),
            "load_average": busy,
            "limits": limits._asdict(),
            "weight_bytes": read,
            "targets": targets(forward, 1e3 * read / limits.read_bytes_per_s),
            "forward": forward,
            "products": products,
        }
        text = json.dumps(plain(result), indent=1, allow_nan=False, ensure_ascii=False)
        write_atomic(folder / "calibrate.json", text + "\n")
        plot(forward, folder / "calibrate.png")
        run.summary({**limits._asdict(), "weight_bytes": read})
        run.attach(folder / "calibrate.png")
    print_tables(result, console)
    speeds = f"{limits.read_bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:.0f} GFLOP/s"
    console.print(
        f"machine: {speeds}; weights {read / 1e6:.0f} MB; limit = max(bytes / bandwidth, flops / peak)",
        style="dim",
    )
    console.print(f"{folder}/calibrate.json, calibrate.png", style="dim", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "calibrate")
