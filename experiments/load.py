"""Speed-up over plain decoding by load: the same prompts in batches of 1, 4, 16, …; what the policy chose at each.

python -m experiments.load method=eagle4 batch=[1,4,16,64]
"""

import json

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eagle4 import answer, conf, text, tracking
from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.load_cost import Batched, decode_batch, summary
from eagle4.pricing import with_costs
from eagle4.prompts import load_prompts
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from experiments.benchmark import PROMPTS, method_of, method_parts

COLUMNS = (
    "batch",
    "method",
    "tok/s",
    "speed-up",
    "tau",
    "levels",
    "nodes",
    "round ms",
    "predicted ms",
    "same ids",
)


def main(config: DictConfig) -> None:
    folder, job = conf.output()
    source, data, sampling = (conf.build(config[k]) for k in ("model", "data", "sampling"))
    batches, repeats = sizes(config)
    path = list(data.path) if isinstance(data.path, tuple) else data.path or str(PROMPTS)
    prompts = load_prompts(path, data.limit)
    model, console = load(fetch(source.source), source.dtype), Console()
    words = load_text(model.tokenizer)
    methods = [method_of(parts, model, sampling) for parts in method_parts(config)]
    asked = [text.encode_chat(words, [{"role": "user", "content": p.turns[0]}]) for p in prompts]
    new = data.max_new_tokens
    capacity = max(answer.capacity_for([m.system for m in methods], len(ids), new) for ids in asked)
    methods, sources = with_costs(model, methods, conf.build(config.costs), batches, [capacity], console)
    table = Table(title=f"{new} tokens a request, {capacity} slots", box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right")
    found = []
    with (
        tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run,
        Progress(console=console, transient=True) as progress,
    ):
        bar = progress.add_task("decoding", total=len(batches) * (repeats + 1) * len(methods))
        for batch in batches:
            runs: dict[str, list[Batched]] = {m.name: [] for m in methods}
            for turn in range(repeats + 1):  # the first one compiles
                for method in methods:
                    chosen = [(turn * batch + i) % len(asked) for i in range(batch)]
                    seeds = [answer.seed_of(f"{sampling.seed}/{prompts[i].id}/{i}") for i in chosen]
                    one = decode_batch(method, words, [asked[i] for i in chosen], seeds, new, capacity)
                    runs[method.name] += [one] if turn else []
                    progress.advance(bar)
            plain = summary(runs[methods[0].name])
            for method in methods:
                row = {"batch": batch, "method": method.name, **summary(runs[method.name])}
                row["speedup_vs_ar"] = row["tokens_per_s"] / plain["tokens_per_s"]
                pairs = zip(runs[method.name], runs[methods[0].name])
                row["identical"] = all(a.ids == b.ids for a, b in pairs) if sampling.greedy else None
                found.append(row)
                run.log(row)
                table.add_row(*cells(row))
        write_atomic(folder / "load.json", json.dumps(found, indent=1) + "\n")
    console.print(table)
    for name, line in sources.items():
        console.print(f"{name}: {line}", style="dim", soft_wrap=True)
    console.print(f"run folder: {folder}", soft_wrap=True)


def sizes(config: DictConfig) -> tuple[list[int], int]:
    given = conf.to_plain(config)
    batches, repeats = given["batch"], given["repeats"]
    if not isinstance(batches, list) or not batches or any(type(b) is not int or b < 1 for b in batches):
        raise BadInput(f"batch must list whole numbers of at least 1, like batch=[1,4]; got {batches}")
    if type(repeats) is not int or repeats < 1:
        raise BadInput(f"repeats must be at least 1, got {repeats}")
    return sorted(set(batches)), repeats


def cells(row: dict) -> list[str]:
    def number(key: str, digits: int = 2) -> str:
        return "–" if row[key] is None else f"{row[key]:.{digits}f}"

    speed = number("tokens_per_s", 1), number("speedup_vs_ar")
    chosen = (
        number("tau"),
        number("levels"),
        number("nodes"),
        number("round_ms", 1),
        number("predicted_ms", 1),
    )
    same = {None: "–", True: "yes", False: "no"}[row["identical"]]
    return [str(row["batch"]), row["method"], *speed, *chosen, same]


if __name__ == "__main__":
    conf.run_app(main, "load")
