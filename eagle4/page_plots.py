"""What methods accepted, decided and took, as figures of a page. None where nothing of the kind was measured."""

from collections.abc import Sequence
from typing import Any

from eagle4.page_figure import Named, Plot, Trace, hue, layout, line, panels, places, rule, series, trace
from eagle4.report import COLOURS
from eagle4.runs import PLAIN
from eagle4.summary import Row

_YELLOW, _BLUE, _GREEN = COLOURS[2], COLOURS[1], COLOURS[3]


def rows_of(runs: Sequence[Named]) -> list[tuple[str, Row]]:
    """The rows of all runs, each with the name of its series."""
    return [(series(row.method, label), row) for label, run in runs for row in run.rows]


def categories_of(runs: Sequence[Named]) -> list[str]:
    """All categories in order of appearance, the pooled one first."""
    return sorted(dict.fromkeys(row.category for _, row in rows_of(runs)), key=lambda name: name != "all")


def acceptance(runs: Sequence[Named]) -> Plot | None:
    """Joint and conditional acceptance by position of the draft; a menu chooses the category."""
    drafted = [(name, row) for name, row in rows_of(runs) if row.joint]
    if not drafted:
        return None
    place, categories = places(runs), categories_of(runs)
    data = {
        str(k): [
            line(name, place[name], range(1, len(values) + 1), values, panel)
            for name, row in drafted
            if row.category == category
            for panel, values in ((1, row.joint), (2, row.conditional))
        ]
        for k, category in enumerate(categories)
    }
    titles = ["joint acceptance rate", "conditional acceptance rate"]
    look = panels(list(dict.fromkeys(name for name, _ in drafted)), "position in the draft (tokens)", titles)
    deepest = max(len(row.joint) for _, row in drafted)
    for axis in ("", "2"):
        look[f"yaxis{axis}"] |= {"range": [0, 1.03]}
        look[f"xaxis{axis}"] |= {"dtick": max(1, deepest // 8)}
    caption = (
        "Left: how often the k-th token of a draft was accepted, among rounds that drafted that far. Right: the same "
        "among rounds that had accepted all before it; where it falls, the drafter gets worse with depth. "
        "A method that goes deep only when it is sure may rise."
    )
    return Plot("acceptance", data, look, caption, (("category", categories),))


def lengths(runs: Sequence[Named]) -> Plot | None:
    """Acceptance length by category, a bar per method."""
    rows = [(name, row) for name, row in rows_of(runs) if row.method != PLAIN and row.tau is not None]
    if not rows:
        return None
    place, categories = places(runs), categories_of(runs)
    traces = []
    for name in dict.fromkeys(name for name, _ in rows):
        own = {row.category: row.tau for other, row in rows if other == name}
        kept = [category for category in categories if category in own]
        look: dict[str, Any] = {"marker": {"color": hue(place[name])}, "hovertemplate": "%{x}: %{y:.2f}"}
        traces.append(trace("bar", name, kept, [own[category] for category in kept], **look))
    look = layout([t["name"] for t in traces], "category of prompts", "τ (tokens per round)", 280)
    look["xaxis"] |= {"categoryorder": "array", "categoryarray": categories}
    look["shapes"] = [rule(y=1.0)]
    caption = (
        "Tokens per round by kind of prompt, the target's own included; the broken line is plain decoding."
    )
    return Plot("lengths", {"": traces}, look, caption)


def phases(runs: Sequence[Named]) -> Plot | None:
    """Milliseconds of drafting, verifying and committing in a round, stacked, a bar per method."""
    rows = [(name, row) for name, row in rows_of(runs) if row.category == "all" and row.verify_ms is not None]
    if not rows:
        return None
    names = [name for name, _ in rows]
    parts = (("draft", "draft_ms", _YELLOW), ("verify", "verify_ms", _BLUE), ("commit", "commit_ms", _GREEN))
    traces = [
        trace(
            "bar",
            title,
            [getattr(row, key) or 0.0 for _, row in rows],
            names,
            orientation="h",
            marker={"color": colour},
            hovertemplate="%{y}: %{x:.2f} ms",
        )
        for title, key, colour in parts
    ]
    look = layout([title for title, _, _ in parts], "time per round (ms)", "method", 40 + 34 * len(rows))
    look["yaxis"] |= {"autorange": "reversed"}
    look["barmode"] = "stack"
    caption = (
        "Where a round's time goes. Each phase was timed on its own over a few tokens, so the sum need not be the "
        "round's time in the compiled loop."
    )
    return Plot("phases", {"": traces}, look, caption)


def answer_of(record: dict[str, Any]) -> str:
    """The name of one answer: its prompt's, with the turn from the second one on."""
    turn = record.get("turn", 0)
    return record["prompt_id"] + (f", turn {turn + 1}" if turn else "")


def decisions(runs: Sequence[Named]) -> Plot | None:
    """Drafted depth, verified nodes and accepted tokens by round, of the method and answer that menus choose."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for label, run in runs:
        for r in run.rounds:
            if r["method"] != PLAIN:
                found.setdefault(series(r["method"], label), {}).setdefault(answer_of(r), []).append(r)
    if not found:
        return None
    # Those that change their mind come first: theirs are the decisions worth a look.
    sizes = {m: {r["verified_nodes"] for rounds in own.values() for r in rounds} for m, own in found.items()}
    methods = sorted(found, key=lambda m: len(sizes[m]) == 1)
    answers = list(dict.fromkeys(name for own in found.values() for name in own))
    data = {
        f"{i}/{j}": _decided(sorted(found[m][a], key=lambda r: r["round"]))
        for i, m in enumerate(methods)
        for j, a in enumerate(answers)
        if a in found[m]
    }
    legend = ["accepted", "drafted depth", "verified nodes, root included"]
    look = layout(legend, "round of the answer (number)", "tokens, levels or nodes (number)", 280)
    look["yaxis"] |= {"rangemode": "tozero"}
    caption = (
        "Round by round, how deep the method drafted, how many nodes it had verified, and the bars that came of it; "
        "an adaptive one falls where guessing did not pay, a fixed one runs level."
    )
    return Plot("decisions", data, look, caption, (("method", methods), ("prompt", answers)))


def _decided(rounds: Sequence[dict[str, Any]]) -> list[Trace]:
    x = [r["round"] + 1 for r in rounds]

    def step(name: str, key: str, colour: str) -> Trace:
        shape = {"shape": "hvh", "color": colour, "width": 2}
        return trace("scatter", name, x, [r[key] for r in rounds], mode="lines", line=shape)

    bars = trace(
        "bar", "accepted", x, [r["num_accepted"] for r in rounds], marker={"color": _GREEN, "opacity": 0.6}
    )
    nodes = step("verified nodes, root included", "verified_nodes", _BLUE)
    return [bars, step("drafted depth", "drafted_depth", _YELLOW), nodes]


def load(runs: Sequence[Named]) -> Plot | None:
    """Speed-up, draft levels and verified nodes by batch, a line per method."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for label, run in runs:
        for r in run.load:
            if r["method"] != PLAIN:
                rows.setdefault(series(r["method"], label), []).append(r)
    if not rows:
        return None
    place = places(runs)
    traces = [
        line(name, place[name], [r["batch"] for r in own], [r[key] for r in own], panel)
        for name, own in rows.items()
        for panel, key in ((1, "speedup_vs_ar"), (2, "levels"), (3, "nodes"))
    ]
    titles = ["speed-up (×)", "levels drafted per round", "nodes verified per request"]
    look = panels(list(rows), "batch (requests)", titles, 260)
    batches = sorted({r["batch"] for own in rows.values() for r in own})
    for axis in ("", "2", "3"):
        look[f"xaxis{axis}"] |= {"type": "log", "tickvals": batches, "ticktext": [str(b) for b in batches]}
        look[f"yaxis{axis}"] |= {"rangemode": "tozero"}
    look["shapes"] = [rule(y=1.0)]
    caption = (
        "Requests decoded together: the speed-up over plain decoding of the same batch (broken line), and how far "
        "each method speculated there."
    )
    return Plot("load", {"": traces}, look, caption)
