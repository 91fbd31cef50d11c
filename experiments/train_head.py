"""Low-rank factors of a drafter's head: fitted, trained, and compared by what they still find.

python -m experiments.train_head drafter=eagle3_1 retrieval.rank=64 retrieval.candidates=256
python -m experiments.train_head -m retrieval.rank=32,64,128 retrieval.candidates=128,256,512
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eagle4 import conf, tracking
from eagle4.checkpoint import load_drafter, save_factors
from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import decode, load_text
from eagle4.train import batches, features, head_study


def main(config: DictConfig) -> dict:
    for name in ("states", "held_out_states", "unroll"):
        if type(config[name]) is not int or config[name] < 1:
            raise BadInput(f"{name} must be a whole number of at least 1, got {config[name]}")
    source, drafter, retrieval, head = (
        conf.build(config[k]) for k in ("model", "drafter", "retrieval", "head")
    )
    if drafter.name != "eagle" or drafter.checkpoint is None:
        raise BadInput("factors belong to a trained drafter; use drafter=eagle3_1 with its checkpoint")
    folder, job = conf.output()
    console = Console()
    model = load(fetch(source.source), source.dtype)
    trained = load_drafter(drafter.checkpoint, model.spec, model.params)
    whole = {name: value for name, value in trained.params.items() if name != "draft_ids"}
    params = eagle_net.borrow(whole, model.params)
    store_folder = Path(config.features)
    taps = trained.spec.taps or features.stored_taps(store_folder)
    mark = features.fingerprint(source.source, model.spec, model.params, taps)
    store = features.open_store(store_folder, mark)
    counts = batches.token_counts(store, model.spec.vocab_size)
    sizes = config.states, config.held_out_states, config.unroll
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("states", total=None)

            def told(what: str, done: int, total: int) -> None:
                progress.update(bar, description=what, completed=done, total=total)

            factors, rows = head_study.study(
                trained.spec, params, store, counts, retrieval, head, sizes, told
            )
        for row in rows:
            run.log(row)
        write_atomic(folder / "coverage.json", json.dumps(rows, indent=1) + "\n")
        run.summary(rows[-1] if rows else {})
        if config.save:
            path = save_factors(drafter.checkpoint, factors, trained.params)
            console.print(f"{path}", soft_wrap=True)
    console.print(table(rows, retrieval.rank, retrieval.candidates))
    words, listed = load_text(model.tokenizer), next(row["missed"] for row in rows if "missed" in row)
    missed = ", ".join(repr(decode(words, [token])) for token in listed) or "none"
    console.print(
        f"tokens that the longest list misses most often: {missed}", highlight=False, soft_wrap=True
    )
    found = next(row for row in reversed(rows) if not row["what"].startswith(" "))
    return {name: found[name] for name in ("top1", "top_k", "mass")}


def table(rows: list[dict[str, Any]], rank: int, candidates: int) -> Table:
    """Coverage by method, and for the last one by depth and by how frequent the token is."""
    made = Table(title=f"rank {rank}, {candidates} candidates", box=box.SIMPLE_HEAD)
    for name in ("candidates from", "states", "top-1", "top-8", "mass"):
        made.add_column(name, justify="left" if name == "candidates from" else "right")
    for row in rows:
        figures = (f"{row[k]:.2%}" if np.isfinite(row[k]) else "–" for k in ("top1", "top_k", "mass"))
        made.add_row(row["what"], str(row["states"]), *figures)
    return made


if __name__ == "__main__":
    conf.run_app(main, "train_head")
