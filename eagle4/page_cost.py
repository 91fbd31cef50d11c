"""Length against cost, and predicted against real cost, as figures of a page. None where nothing was measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from eagle4.page_figure import GREY, INK, Named, Plot, Trace, hue, layout, places, rule, series, trace
from eagle4.page_plots import answer_of
from eagle4.runs import PLAIN, RunFolder

MARKS = {"policy": "diamond", "fixed": "x", "oracle": "star"}  # the kinds that a replay tells apart
_SYMBOLS = ("circle", "square", "triangle-up", "cross", "pentagon")  # of measured points, by batch
_CLOSE = (0.12, 0.08)  # of the width and of the height: labels of two points as close as that would meet
_LABELLED = 12  # of more points than this, or of several batches, names stand in the hover text only


class Point(NamedTuple):
    """One method or setting. `kind`: measured, or a replay's; `cost`: time per token, plain decoding's = 1;
    `ms`: milliseconds a token, of the whole batch.
    """

    name: str
    kind: str
    batch: int
    tau: float
    cost: float
    ms: float

    @property
    def replayed(self) -> bool:
        return self.kind != "measured"


def points(runs: Sequence[Named]) -> list[Point]:
    """All methods and settings that have a length and a cost, plain decoding itself apart."""
    found = []
    for label, run in runs:
        for row in run.rows:
            if (
                row.category == "all"
                and row.method != PLAIN
                and row.tau
                and row.tokens_per_s
                and row.speedup_vs_ar
            ):
                cost, ms = 1 / row.speedup_vs_ar, 1e3 / row.tokens_per_s
                found.append(Point(series(row.method, label), "measured", 1, row.tau, cost, ms))
        for r in run.load:
            if r["method"] != PLAIN and r["tau"] and r["speedup_vs_ar"] and r["tokens_per_s"]:
                name, cost, ms = series(r["method"], label), 1 / r["speedup_vs_ar"], 1e3 / r["tokens_per_s"]
                found.append(Point(name, "measured", r["batch"], r["tau"], cost, ms))
        for r in run.replay:
            if r["tau"] and r["speedup"] and r["ms_per_token"]:
                name, cost = series(r["name"], label), 1 / r["speedup"]
                found.append(Point(name, r["kind"], r["batch"], r["tau"], cost, r["ms_per_token"]))
    return found


def pareto(plane: Sequence[tuple[float, float]]) -> list[int]:
    """Which (cost, length) no other one matches in one and beats in the other, cheapest first; of equals the first."""
    best, front = -math.inf, []
    for i in sorted(range(len(plane)), key=lambda i: (plane[i][0], -plane[i][1])):
        if plane[i][1] > best:
            best = plane[i][1]
            front.append(i)
    return front


def length_and_cost(runs: Sequence[Named]) -> Plot | None:
    """Acceptance length against time per token, with the Pareto front of each batch, measured and replayed apart."""
    found = points(runs)
    if not found:
        return None
    place, batches = places(runs), sorted({p.batch for p in found})
    sides = label_sides([(p.cost, p.tau) for p in found])
    groups: dict[tuple[str, int], list[Point]] = {}
    for p in sorted(found, key=lambda p: (p.replayed, p.kind != "policy", p.kind, p.batch)):
        groups.setdefault((p.kind, p.batch), []).append(p)
    plain = trace(
        "scatter", "plain decoding", [1.0], [1.0], mode="markers", marker={"color": GREY, "size": 11}
    )
    traces = [
        *_fronts(found, batches),
        plain,
        *(
            _cloud(own, place, batches, sides if len(found) <= _LABELLED and len(batches) == 1 else None)
            for own in groups.values()
        ),
    ]
    names = [t["name"] for t in traces]
    cost, length = "time per token (plain decoding = 1)", "acceptance length τ (tokens per round)"
    look = layout(names, cost, length, 400) | {"shapes": [rule(x=1.0)]}
    caption = (
        "Up is longer acceptance, left is a faster answer: what stands left of the broken line beats plain decoding. "
        "Ringed points are on the Pareto front of their kind: none there is both faster and longer."
    )
    return Plot("cost", {"": traces}, look, caption)


def _fronts(found: Sequence[Point], batches: Sequence[int]) -> list[Trace]:
    """Plain decoding is a candidate of every front, the oracle of none: it knows the text, so nobody can choose it."""
    traces = []
    for replayed in (False, True):
        candidates = [p for p in found if p.replayed == replayed and p.kind != "oracle"]
        for batch in sorted({p.batch for p in candidates}):
            plane = [(1.0, 1.0), *((p.cost, p.tau) for p in candidates if p.batch == batch)]
            front = [plane[i] for i in pareto(plane)]
            look = {"shape": "hv", "color": INK, "width": 1.4, "dash": "dot" if replayed else "solid"}
            name = f"front, {'replayed' if replayed else 'measured'}{_of(batch, batches)}"
            ring = {"symbol": "circle-open", "size": 17, "color": INK}
            steps = {"mode": "lines+markers", "line": look, "marker": ring, "hoverinfo": "skip"}
            traces.append(trace("scatter", name, [x for x, _ in front], [y for _, y in front], **steps))
    return traces


def label_sides(plane: Sequence[tuple[float, float]]) -> dict[tuple[float, float], str]:
    """Where the name of each (cost, length) stands: above it, or below if another point is close above it."""
    wide, high = (max(values) - min(values) for values in zip(*plane, (1.0, 1.0)))

    def under(p: tuple[float, float]) -> bool:
        near = (q for q in plane if abs(q[0] - p[0]) < _CLOSE[0] * wide and q[1] - p[1] < _CLOSE[1] * high)
        return any((q[1], q[0]) > (p[1], p[0]) for q in near)

    return {p: "bottom center" if under(p) else "top center" for p in plane}


def _cloud(
    own: Sequence[Point],
    place: dict[str, int],
    batches: Sequence[int],
    sides: dict[tuple[float, float], str] | None,
) -> Trace:
    """Points of one kind and batch, named on their `sides`. Measured ones wear their series' colour, replayed ones
    their batch's."""
    first = own[0]
    at = batches.index(first.batch)
    colours = [hue(at if p.replayed else place.get(p.name)) for p in own]
    symbol = MARKS.get(first.kind, "hexagon") if first.replayed else _SYMBOLS[at % len(_SYMBOLS)]
    size = 14 if first.kind == "oracle" else 7 if first.replayed else 11
    return trace(
        "scatter",
        (f"replayed: {first.kind}" if first.replayed else "measured") + _of(first.batch, batches),
        [p.cost for p in own],
        [p.tau for p in own],
        mode="markers+text" if sides else "markers",
        text=[p.name for p in own],
        textposition=[sides[p.cost, p.tau] for p in own] if sides else "top center",
        cliponaxis=False,
        customdata=[[p.ms, 1 / p.cost] for p in own],
        marker={"color": colours, "symbol": symbol, "size": size, "opacity": 0.65 if size == 7 else 1},
        hovertemplate="%{text}<br>τ %{y:.2f}, %{customdata[0]:.1f} ms a token, %{customdata[1]:.2f}×<extra></extra>",
    )


def _of(batch: int, batches: Sequence[int]) -> str:
    return f", batch {batch}" if len(batches) > 1 else ""


def priced(run: RunFolder) -> dict[tuple[str, str], tuple[float, float]]:
    """(predicted, measured) mean milliseconds a round of every (method, answer) that a cost table priced."""
    told: dict[tuple[str, str], list[float]] = {}
    for r in run.rounds:
        if isinstance(r.get("predicted_ms"), (int, float)):
            told.setdefault((r["method"], answer_of(r)), []).append(r["predicted_ms"])
    taken = {
        (r["method"], answer_of(r)): 1e3 * r["decode/time_s"] / r["decode/rounds"]
        for r in run.requests
        if r["decode/rounds"]
    }
    return {key: (sum(ms) / len(ms), taken[key]) for key, ms in told.items() if key in taken}


def predictions(runs: Sequence[Named]) -> Plot | None:
    """Mean predicted against mean measured milliseconds a round, a point per answer; on the line they agree."""
    traces: list[Trace] = []
    place = places(runs)
    for label, run in runs:
        pairs = priced(run)
        for method in dict.fromkeys(key[0] for key in pairs):
            own = {name: pair for (other, name), pair in pairs.items() if other == method}
            name = series(method, label)
            look = {
                "mode": "markers",
                "text": list(own),
                "marker": {"color": hue(place.get(name)), "size": 8, "opacity": 0.75},
                "hovertemplate": "%{text}: %{x:.1f} ms predicted, %{y:.1f} taken",
            }
            x, y = zip(*own.values())
            traces.append(trace("scatter", name, x, y, **look))
    if not traces:
        return None
    values = [value for t in traces for value in (*t["x"], *t["y"])]
    ends = [0.95 * min(values), 1.05 * max(values)]
    dashed = {"color": INK, "width": 1, "dash": "dash"}
    equal = trace("scatter", "equal", ends, ends, mode="lines", line=dashed, hoverinfo="skip")
    names = [*(t["name"] for t in traces), "equal"]
    look = layout(names, "predicted time per round (ms)", "measured time per round (ms)", 320)
    caption = "A point per answer: above the broken line its rounds took longer than the cost table had said."
    return Plot("predictions", {"": [equal, *traces]}, look, caption)
