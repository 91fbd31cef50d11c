"""Results a person reads: a table, a figure and a JSON file, all from the same rows of `eagle4.summary`."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle4.files import plain, write_atomic
from eagle4.summary import Row

# Okabe and Ito's palette, told apart by every common kind of colour vision.
COLOURS = ("#7f7f7f", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")


def write_summary(rows: Sequence[Row], path: str | Path) -> None:
    """`summary.json`: one object per row under the names of `Row`; what is not known is null, never NaN."""
    values = [plain(dataclasses.asdict(row)) for row in rows]
    write_atomic(path, json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Prints a section per category and in it a line per method.

    Phase times are left out if nothing was timed or the console is narrower than 100 columns.
    """
    timed = any(value is not None for row in rows for value in (row.draft_ms, row.verify_ms, row.commit_ms))
    phases = ["draft\nms", "verify\nms", "commit\nms"] if timed and console.width >= 100 else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in ("tok/s", "τ", "speed-up", "95 %", "round\nms", *phases, "TTFT\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("greedy\nidentical", no_wrap=True)
    for category in _categories(rows):
        table.add_row(Text(category, style="bold"))
        for row in rows:
            if row.category == category:
                style = "red" if row.greedy_identical is False else None
                table.add_row(Text(f"  {row.method}"), *_cells(row, bool(phases)), style=style)
        table.add_section()
    console.print(table)
    note = "tok/s, speed-up: decode without prefill, pooled over prompts; τ counts the target's own token"
    console.print(note, style="dim")


def _cells(row: Row, timed: bool) -> list[str]:
    phases = [_number(ms, 1) for ms in (row.draft_ms, row.verify_ms, row.commit_ms)] if timed else []
    low, high = row.speedup_low, row.speedup_high
    interval = "–" if low is None or high is None else f"{low:.2f}–{high:.2f}"
    return [
        _number(row.tokens_per_s, 1),
        _number(row.tau, 2),
        _number(row.speedup_vs_ar, 2) + ("×" if row.speedup_vs_ar is not None else ""),
        interval,
        _number(row.round_ms, 1),
        *phases,
        _number(row.ttft_ms, 0),
        _identity(row),
    ]


def _identity(row: Row) -> str:
    if row.greedy_identical is None:
        return "n/a"
    ties = f" {row.ties} {'tie' if row.ties == 1 else 'ties'}" if row.ties else ""
    return ("✓" if row.greedy_identical else "✗ DIFFERS") + ties


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _categories(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row.category for row in rows))
    return sorted(names, key=lambda name: name == "all")


def plot_summary(rows: Sequence[Row], path: str | Path) -> None:
    """Saves a figure of two panels, decode tokens/s and τ by category, with a bar per method.

    The speed-up stands above each bar of the first panel that is not plain decoding itself.
    With a single category `all` is left out, being the same.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    categories = _categories(rows)
    if len(categories) == 2:
        categories = categories[:1]
    methods = list(dict.fromkeys(row.method for row in rows))
    figure = Figure(
        figsize=(max(6.4, 2.0 + 0.34 * len(categories) * (len(methods) + 1)), 6.4), layout="constrained"
    )
    FigureCanvasAgg(figure)
    speed, accepted = figure.subplots(2, 1, sharex=True)
    by_key = {(row.method, row.category): row for row in rows}
    _bars(speed, by_key, methods, categories, lambda row: row.tokens_per_s, _speedup_label)
    _bars(accepted, by_key, methods, categories, lambda row: row.tau, lambda row: _number(row.tau, 2))
    speed.set_ylabel("decode tokens/s")
    accepted.set_ylabel("acceptance length τ\n(target's token included)")
    accepted.axhline(1.0, color="0.4", linewidth=0.8, linestyle=(0, (4, 3)))
    accepted.set_xticks(range(len(categories)), [name.replace("_", "\n") for name in categories])
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(methods)), frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _speedup_label(row: Row) -> str:
    if row.speedup_vs_ar is None or row.speedup_vs_ar == row.speedup_low == row.speedup_high == 1.0:
        return ""
    return f"{row.speedup_vs_ar:.2f}×"


def _bars(
    axes: Any,
    by_key: dict[tuple[str, str], Row],
    methods: list[str],
    categories: list[str],
    value: Callable[[Row], float | None],
    label: Callable[[Row], str],
) -> None:
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        rows = [by_key.get((method, category)) for category in categories]
        places = [x + (i - (len(methods) - 1) / 2) * width for x in range(len(categories))]
        heights = [0.0 if row is None else value(row) or 0.0 for row in rows]
        bars = axes.bar(places, heights, 0.92 * width, label=method, color=COLOURS[i % len(COLOURS)])
        labels = ["" if row is None else label(row) for row in rows]
        axes.bar_label(bars, labels, padding=2, fontsize=7, rotation=90 if len(methods) > 3 else 0)
    axes.margins(x=0.02, y=0.18)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    if "all" in categories and len(categories) > 1:
        axes.axvline(len(categories) - 1.5, color="0.7", linewidth=0.8)
