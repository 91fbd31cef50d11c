"""Time to grow and to verify a draft tree apart from any network, beside a plain decode step of the real model.

python -m experiments.tree_cost tree.width=4 tree.children=4 tree.depth=6
"""

import json

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eagle4 import conf, tracking
from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.tree_cost import GROWN, tree_times
from eagle4.verify import VERIFIERS


def main(config: DictConfig) -> None:
    if type(config.repeats) is not int or config.repeats < 1:
        raise BadInput(f"repeats must be at least 1, got {config.repeats}")
    source, tree, console = conf.build(config.model), conf.build(config.tree), Console()
    if tree.kind == "static":
        raise BadInput("tree_cost times chain, dynamic and sampled trees; give tree=dynamic and its sizes")
    folder, job = conf.output()
    model = load(fetch(source.source), source.dtype)
    with (
        tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run,
        Progress(console=console, transient=True) as progress,
    ):
        total = (config.repeats + 2) * (1 + len(GROWN) + len(VERIFIERS))
        bar = progress.add_task("timing", total=total)
        rows = tree_times(model, tree, list(VERIFIERS), config.repeats, lambda _: progress.advance(bar))
        for row in rows:
            run.log(row)
        write_atomic(folder / "tree_cost.json", json.dumps(rows, indent=1) + "\n")
    title = f"{tree.nodes} nodes, {tree.depth} levels, vocabulary {model.spec.vocab_size}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("", "ms", "spread", "of a plain decode step"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(row["what"], f"{row['ms']:.2f}", f"{row['spread']:.0%}", f"{row['share']:.1%}")
    console.print(table)
    console.print(f"run folder: {folder}", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "tree_cost")
