"""One figure of several runs: a figure of theirs against another, or against a setting.

python -m experiments.plot_sweep runs/<day>/<sweep> x=tokens y=tau_sim,tau
python -m experiments.plot_sweep runs/<day>/<run> runs/<day>/<run> x=train.share y=decode/tau out=by_tokens.png
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle4.errors import BadInput
from eagle4.sweeps import RESULTS, number_of


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 2 with one line for what could not be drawn."""
    options = dict(a.split("=", 1) for a in arguments if "=" in a)
    folders = [Path(a) for a in arguments if "=" not in a]
    try:
        if unknown := set(options) - {"x", "y", "out"}:
            raise BadInput(f"unknown option {', '.join(sorted(unknown))}; known are x, y and out")
        if not folders or "x" not in options or "y" not in options:
            raise BadInput("name folders, x and y, like runs/<day>/<sweep> x=tokens y=tau_sim,tau")
        names = options["y"].split(",")
        points = [(figure(run, options["x"]), [figure(run, y) for y in names]) for run in runs(folders)]
        out = Path(options.get("out", folders[0] / "plot.png"))
        draw(sorted(points), options["x"], names, out)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


def runs(folders: Sequence[Path]) -> list[Path]:
    """Run folders, those of a sweep's jobs for a sweep."""
    found = []
    for folder in folders:
        jobs = sorted((p for p in folder.glob("*_*") if p.is_dir() and number_of(p) >= 0), key=number_of)
        found += jobs or [folder]
    return found


def figure(run: Path, name: str) -> float:
    """A number of a run: from its results, its summary, or its config. Raises BadInput if it has none of this name."""
    for known in (results(run), summary(run)):
        if isinstance(known.get(name), (int, float)):
            return float(known[name])
    if (run / "config.yaml").is_file():
        value = OmegaConf.select(OmegaConf.load(run / "config.yaml"), name)
        if isinstance(value, (int, float)):
            return float(value)
    raise BadInput(f"{run} has no figure {name!r} in {RESULTS}, in its summary or in its config")


def results(run: Path) -> dict[str, Any]:
    path = run / RESULTS
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def summary(run: Path) -> dict[str, Any]:
    """All figures of the summaries in metrics.jsonl, later ones winning."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith('{"summary"'):
            found |= json.loads(line)["summary"]
    return found


def draw(points: Sequence[tuple[float, list[float]]], x: str, names: Sequence[str], out: Path) -> None:
    """Lines with their points; the horizontal axis is logarithmic where values span a factor of four or more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure_, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    places = [p[0] for p in points]
    for i, name in enumerate(names):
        axis.plot(places, [p[1][i] for p in points], "o-", label=name)
    if places[0] > 0 and places[-1] / places[0] >= 4:
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{p:g}" for p in places])
    axis.set_xlabel(x)
    axis.grid(alpha=0.3)
    axis.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure_.savefig(out, dpi=150)
    plt.close(figure_)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
