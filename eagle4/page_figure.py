"""The parts that a page's figures are put together from: names, colours, traces and layouts in Plotly's own JSON."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from eagle4.report import COLOURS
from eagle4.runs import PLAIN, RunFolder

Trace = dict[str, Any]
Named = tuple[str, RunFolder]  # a run and what tells it from the others; "" for the only one

GREY, INK = COLOURS[0], "#444444"
_HUES = COLOURS[1:7]
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_LINE_CHARS, _LINE_PX = 125, 21  # what a line of the legend holds, and how high it is


class Plot(NamedTuple):
    """A figure under an id. `data` holds its traces under the numbers of the chosen options joined by `/`, under ""
    without a choice; `choices` are (title, options) of its menus. The caption says what to see.
    """

    name: str
    data: dict[str, list[Trace]]
    layout: dict[str, Any]
    caption: str
    choices: tuple[tuple[str, list[str]], ...] = ()


def series(method: str, label: str) -> str:
    """A method of a run in words: `eagle4`, or with several runs `eagle4 · tree.depth=4`."""
    return " · ".join([method, *(word for word in label.split(" · ") if word and word != method)])


def places(runs: Sequence[Named]) -> dict[str, int]:
    """Every series but plain decoding, numbered: the number is its colour in all figures of the page."""
    names = [
        series(method, label)
        for label, run in runs
        for method in (*(row.method for row in run.rows), *(r["method"] for r in (*run.load, *run.rounds)))
        if method != PLAIN
    ]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def hue(place: int | None) -> str:
    """The colour of a series by its number; grey for plain decoding, which has none."""
    return GREY if place is None else _HUES[place % len(_HUES)]


def trace(kind: str, name: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> Trace:
    return {"type": kind, "name": name, "x": list(x), "y": list(y), **more}


def line(name: str, place: int, x: Sequence[Any], y: Sequence[Any], panel: int) -> Trace:
    """A line with markers in a panel, counted from 1; the first panel's stands for all in the legend."""
    axis = "" if panel == 1 else str(panel)
    return trace(
        "scatter",
        name,
        x,
        y,
        mode="lines+markers",
        legendgroup=name,
        showlegend=panel == 1,
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        line={"color": hue(place), "dash": _DASHES[place // len(_HUES) % len(_DASHES)]},
        hovertemplate="%{y:.3g}",
    )


def layout(legend: Collection[str], x: str, y: str, height: int = 340) -> dict[str, Any]:
    """One panel with titled axes, the legend above it; `height` is that of the panel in pixels."""
    top = 14 + _LINE_PX * max(1, math.ceil(sum(len(name) + 8 for name in legend) / _LINE_CHARS))
    return {
        "height": height + top + 50,
        "margin": {"t": top, "r": 16, "b": 50, "l": 60},
        "font": {"family": _FONT, "size": 13, "color": "#202124"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hovermode": "closest",
        "barmode": "group",
        "showlegend": True,
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
        "xaxis": _axis(x),
        "yaxis": _axis(y),
    }


def panels(legend: Collection[str], x: str, titles: Sequence[str], height: int = 300) -> dict[str, Any]:
    """Panels side by side over the same x title, a y title each."""
    found, gap = layout(legend, x, titles[0], height), 0.09
    wide = (1 - gap * (len(titles) - 1)) / len(titles)
    for i, title in enumerate(titles):
        axis = "" if i == 0 else str(i + 1)
        start = i * (wide + gap)
        found[f"xaxis{axis}"] = {**_axis(x), "domain": [start, start + wide], "anchor": f"y{axis}"}
        found[f"yaxis{axis}"] = {**_axis(title), "anchor": f"x{axis}"}
    return found


def _axis(title: str) -> dict[str, Any]:
    lines = {"gridcolor": "#ececec", "zeroline": False, "linecolor": "#9aa0a6", "showline": True}
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **lines}


def rule(x: float | None = None, y: float | None = None) -> dict[str, Any]:
    """A broken line across the first panel: down at `x`, or from side to side at `y`."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1} if y is None else {"x0": 0, "x1": 1, "y0": y, "y1": y}
    refs = {"xref": "x", "yref": "y domain"} if y is None else {"xref": "x domain", "yref": "y"}
    return {"type": "line", **ends, **refs, "line": {"color": GREY, "width": 1, "dash": "dash"}}
