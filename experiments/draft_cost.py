"""Time of a draft step, body and head apart, beside a plain decode step of the real model.

python -m experiments.draft_cost method=eagle3_1 rows=[1,4,8]
python -m experiments.draft_cost method=eagle4 heads=[full,own,r64c256]
"""

import json

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eagle4 import conf, tracking
from eagle4.draft_cost import draft_times
from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.methods import build_method, with_head
from eagle4.specs import SamplingSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load


def main(config: DictConfig) -> None:
    rows = sorted(set(conf.to_plain(config)["rows"]))
    if not rows or any(type(n) is not int or not 1 <= n <= 64 for n in rows):
        raise BadInput(f"rows must list whole numbers in 1..64, like rows=[1,4,8]; got {config.rows}")
    for name in ("repeats", "context"):
        if type(config[name]) is not int or config[name] < 1:
            raise BadInput(f"{name} must be at least 1, got {config[name]}")
    if config.context < rows[-1]:
        raise BadInput(f"context={config.context} must be at least the largest of rows={rows}")
    source, console = conf.build(config.model), Console()
    folder, job = conf.output()
    model = load(fetch(source.source), source.dtype)
    drafter, tree, policy = (conf.build(config[key]) for key in ("drafter", "tree", "policy"))
    target = model.spec, SamplingSpec(), model.params
    named = (
        {config.name: drafter} if config.heads is None else {h: with_head(drafter, h) for h in config.heads}
    )
    methods = {
        name: build_method(config.name, each, tree, policy, config.verifier, *target)
        for name, each in named.items()
    }
    with (
        tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run,
        Progress(console=console, transient=True) as progress,
    ):
        bar = progress.add_task(
            "timing", total=(config.repeats + 2) * (1 + (2 + 2 * len(methods)) * len(rows))
        )
        timed = draft_times(
            model, methods, config.context, rows, config.repeats, lambda _: progress.advance(bar)
        )
        for row in timed:
            run.log(row)
        write_atomic(folder / "draft_cost.json", json.dumps(timed, indent=1) + "\n")
    table = Table(title=f"{config.name}, context {config.context}", box=box.SIMPLE_HEAD)
    for name in ("", "rows", "ms", "spread", "of a plain decode step"):
        table.add_column(name, justify="right" if name else "left")
    for row in timed:
        figures = f"{row['ms']:.2f}", f"{row['spread']:.0%}", f"{row['share']:.1%}"
        table.add_row(row["what"], str(row["rows"]), *figures)
    console.print(table)
    console.print(f"run folder: {folder}", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "draft_cost")
