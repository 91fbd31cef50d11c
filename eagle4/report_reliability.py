"""How far a drafter's path probabilities can be trusted, as a plot."""

from pathlib import Path

import numpy as np

from eagle4.harness.reliability import Reliability
from eagle4.report import COLOURS


def plot(counts: Reliability, corrected: Reliability | None, path: Path) -> None:
    """Acceptance rate against claimed probability, a line a depth; the diagonal is a drafter that is right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [("claimed", counts)] + ([("corrected, other rounds", corrected)] if corrected else [])
    figure = Figure(figsize=(1.0 + 4.2 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        axes.plot([0, 1], [0, 1], "--", color="0.6", linewidth=1)
        for d in range(len(shown.tried)):
            seen = np.asarray(shown.seen[d])
            kept = seen >= 20  # fewer say little
            if kept.any():
                x, y = (np.asarray(sums[d])[kept] / seen[kept] for sums in (shown.claimed, shown.accepted))
                axes.plot(x, y, "o-", markersize=4, color=COLOURS[d % len(COLOURS)], label=f"depth {d + 1}")
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel=f"path probability, {title}", aspect="equal")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("share that was accepted")
    part = path.with_suffix(".part")
    figure.savefig(part, dpi=160, format="png")
    part.replace(path)
