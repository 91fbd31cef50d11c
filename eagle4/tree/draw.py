"""Draft trees as text and as SVG, for notebooks and reports. Host code: one row of a batch, no batch axis."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from eagle4.types import Draft, Verdict

_BOX_HEIGHT, _ROW, _COLUMN_GAP, _CHAR, _MARGIN = 34, 46, 34, 7.4, 12
_ACCEPTED, _REJECTED, _ROOT = ("#0b6e4f", "#e3f5ec"), ("#9aa0a6", "#f4f5f6"), ("#1f3a5f", "#e4ecf7")


def ascii(
    parent: ArrayLike,
    labels: Sequence[str],
    scores: ArrayLike | None = None,
    path: ArrayLike = (),
) -> str:
    """The tree as indented text, children below their parent in draft order.

    `labels` holds one text per node, `scores` log path probabilities (shown as probabilities) and `path`
    the accepted nodes (`Verdict.path`; −1 entries are skipped). Accepted nodes carry `*`, as does the root.
    Unused nodes (parent −1 except node 0) are left out.

        > the        1.000 *
        ├─ cat       0.600 *
        │  └─ sat    0.300
        └─ dog       0.200
    """
    parents = [int(p) for p in np.asarray(parent)]
    kids, accepted = _children(parents), _accepted(path)
    lines: list[tuple[str, int]] = []

    def visit(node: int, lead: str) -> None:
        for place, child in enumerate(kids[node]):
            last = place == len(kids[node]) - 1
            lines.append((f"{lead}{'└─' if last else '├─'} {_visible(labels[child])}", child))
            visit(child, lead + ("   " if last else "│  "))

    lines.append((f"> {_visible(labels[0])}", 0))
    visit(0, "")
    width = max(len(text) for text, _ in lines)
    return "\n".join(
        f"{text.ljust(width)}{_probability(scores, n, '  ')}{' *' if n in accepted else ''}".rstrip()
        for text, n in lines
    )


def svg(
    parent: ArrayLike,
    labels: Sequence[str],
    scores: ArrayLike | None = None,
    path: ArrayLike | None = None,
) -> str:
    """The tree as a self-contained SVG: one column per depth, accepted path in green, rejected nodes in grey.

    Arguments as in `ascii`; without `path` nothing is marked as rejected. Labels are escaped and shortened
    to 18 characters.
    """
    parents = [int(p) for p in np.asarray(parent)]
    kids = _children(parents)
    accepted = None if path is None else _accepted(path)
    left, middle = _layout(parents, kids, labels)
    nodes = sorted(middle)
    width = max(left[n][0] + left[n][1] for n in nodes) + _MARGIN
    height = max(middle.values()) + _ROW / 2 + _MARGIN
    edges = [_edge(parents[n], n, left, middle, accepted) for n in nodes if n]
    boxes = [_box(n, _short(labels[n]), _probability(scores, n, ""), left, middle, accepted) for n in nodes]
    return "\n".join([_open(width, height, 12), *edges, *boxes, "</svg>"])


class Drawn(NamedTuple):
    """What `ascii` and `svg` need of one row of a draft, accepted path included."""

    parent: np.ndarray
    labels: list[str]
    scores: np.ndarray | None
    path: np.ndarray


def drawn(draft: Draft, verdict: Verdict, row: int, words: Callable[[int], str]) -> Drawn:
    """One row of a round's draft and verdict; `words` turns a token id into its text.

    Scores that are all 0 are no estimate (copied text has none) and are left out.
    """
    labels = [words(int(t)) for t in np.asarray(draft.tokens[row])]
    scores = np.asarray(draft.score[row])
    known = np.any(scores[np.asarray(draft.candidate[row])] != 0)
    return Drawn(
        np.asarray(draft.parent[row]), labels, scores if known else None, np.asarray(verdict.path[row])
    )


def mask_ascii(attend: ArrayLike) -> str:
    """An attention mask as a grid: row n shows which nodes n sees (`x`), `.` elsewhere."""
    mask = np.asarray(attend, bool)
    digits = len(str(max(mask.shape) - 1))
    head = " ".join(str(m).rjust(digits) for m in range(mask.shape[1]))
    rows = [
        f"{str(n).rjust(digits)}  " + " ".join(("x" if seen else ".").rjust(digits) for seen in row)
        for n, row in enumerate(mask)
    ]
    return "\n".join([" " * (digits + 2) + head, *rows])


def mask_svg(attend: ArrayLike, cell: int = 16) -> str:
    """An attention mask as a self-contained SVG grid: queries down, keys across, filled where seen."""
    mask = np.asarray(attend, bool)
    edge = 26
    width, height = edge + cell * mask.shape[1] + 2, edge + cell * mask.shape[0] + 2
    parts = [_open(width, height, 9)]
    parts += [_text(edge + cell * (m + 0.5), edge - 6, str(m), "#5f6368") for m in range(mask.shape[1])]
    for n in range(mask.shape[0]):
        parts.append(_text(edge - 12, edge + cell * (n + 0.5) + 3, str(n), "#5f6368"))
        for m in range(mask.shape[1]):
            fill = "#1f3a5f" if mask[n, m] else "#ffffff"
            parts.append(
                f'<rect x="{edge + cell * m}" y="{edge + cell * n}" width="{cell}" height="{cell}" '
                f'fill="{fill}" stroke="#d0d4d9"/>'
            )
    return "\n".join([*parts, "</svg>"])


def _children(parents: list[int]) -> list[list[int]]:
    return [[m for m in range(1, len(parents)) if parents[m] == n] for n in range(len(parents))]


def _accepted(path: ArrayLike) -> set[int]:
    return {0, *(int(n) for n in np.asarray(path, int).ravel() if n >= 0)}


def _visible(label: str) -> str:
    """White space made visible: ' the' and 'the' differ. Control characters become �: SVG bans them."""
    shown = label.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    return "".join(char if char.isprintable() else "�" for char in shown)


def _short(label: str) -> str:
    text = _visible(label)
    return text if len(text) <= 18 else text[:17] + "…"


def _probability(scores: ArrayLike | None, node: int, lead: str) -> str:
    return "" if scores is None else f"{lead}{math.exp(float(np.asarray(scores)[node])):.3f}"


def _layout(
    parents: list[int], kids: list[list[int]], labels: Sequence[str]
) -> tuple[dict[int, tuple[float, float]], dict[int, float]]:
    """(x, width) of each node's box and the y of its middle: leaves get a row each, parents the mean."""
    depth, middle = {0: 0}, dict[int, float]()
    next_row = _MARGIN + _ROW / 2

    def place(node: int) -> None:
        nonlocal next_row
        for child in kids[node]:
            depth[child] = depth[node] + 1
            place(child)
        if kids[node]:
            middle[node] = (middle[kids[node][0]] + middle[kids[node][-1]]) / 2
        else:
            middle[node] = next_row
            next_row += _ROW

    place(0)
    wide = [
        max(5, *(len(_short(labels[n])) for n in depth if depth[n] == d)) * _CHAR + 18
        for d in range(max(depth.values()) + 1)
    ]
    start = [_MARGIN + sum(wide[:d]) + d * _COLUMN_GAP for d in range(len(wide))]
    return {n: (start[d], wide[d]) for n, d in depth.items()}, middle


def _edge(
    above: int,
    node: int,
    left: dict[int, tuple[float, float]],
    middle: dict[int, float],
    accepted: set[int] | None,
) -> str:
    x0, x1 = left[above][0] + left[above][1], left[node][0]
    y0, y1, bend = middle[above], middle[node], (left[node][0] - left[above][0] - left[above][1]) / 2
    taken = accepted is not None and node in accepted
    stroke, thick = (_ACCEPTED[0], 2.2) if taken else (_REJECTED[0], 1.1)
    return (
        f'<path d="M{x0:.1f} {y0:.1f} C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}" '
        f'fill="none" stroke="{stroke}" stroke-width="{thick}"/>'
    )


def _box(
    node: int,
    label: str,
    probability: str,
    left: dict[int, tuple[float, float]],
    middle: dict[int, float],
    accepted: set[int] | None,
) -> str:
    if node == 0 or accepted is None:
        kind, (stroke, fill) = ("root" if node == 0 else "node"), _ROOT
    elif node in accepted:
        kind, (stroke, fill) = "accepted", _ACCEPTED
    else:
        kind, (stroke, fill) = "rejected", _REJECTED
    (x, width), y = left[node], middle[node]
    lift = 4 if not probability else -2
    return (
        f'<g class="{kind}"><rect x="{x:.1f}" y="{y - _BOX_HEIGHT / 2:.1f}" width="{width:.1f}" '
        f'height="{_BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'
        f"{_text(x + width / 2, y + lift, label, '#202124')}"
        + (_text(x + width / 2, y + 12, probability, "#5f6368", 10) if probability else "")
        + "</g>"
    )


def _open(width: float, height: float, font: int) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    style = f'font-family="ui-monospace, Menlo, monospace" font-size="{font}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'


def _text(x: float, y: float, text: str, fill: str, size: int | None = None) -> str:
    font = "" if size is None else f' font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{fill}"{font}>{escape(text)}</text>'
