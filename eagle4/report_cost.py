"""Forward costs as tables and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eagle4.forward_cost import AIM
from eagle4.report import COLOURS


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
            "time of the ordinary product / time of dense, by rows",
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


def print_draft(name: str, draft: list[dict[str, Any]], console: Console) -> None:
    """What a drafter's parts cost; nothing for a drafter without a network."""
    if not draft:
        return
    titles = ("part", "batch", "context", "width", "ms", "spread", "of a plain decode step")
    table = grid(f"draft parts of {name}", titles)
    for r in draft:
        figures = (f"{r['ms']:.2f}", f"{r['spread']:.0%}", f"{r['share']:.1%}")
        table.add_row(r["part"], str(r["batch"]), str(r["context"]), str(r["width"]), *figures)
    console.print(table)


def grid(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in columns:
        named = name in ("weights", "aim", "part")
        table.add_column(name, justify="left" if named else "right", no_wrap=named)
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
