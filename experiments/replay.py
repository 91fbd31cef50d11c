"""Judge policies, trees, heads and hardware on a recording: no decoding, exact rounds, costs of any table.

python -m experiments.replay method=eagle4
python -m experiments.replay 'grid=[{policy.tau: [0, 1, 1.5], policy.nodes: [4, 8]}]'
python -m experiments.replay costs.table=hardware:h200 batch=64
python -m experiments.replay -m +experiment=ablate_depth_width
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from eagle4 import ablation, conf, cost_table, record, recording, tracking
from eagle4.ablation import Outcome, Setting
from eagle4.answer import CAPACITY_STEP
from eagle4.errors import BadInput
from eagle4.files import plain, write_atomic
from eagle4.methods import Method, calibrated
from eagle4.pricing import table_for
from eagle4.recording import About, Variant
from eagle4.round_cost import lists_for
from eagle4.specs import TreeSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load
from experiments.record import method_with

SHOWN = 12
# The jobs of a sweep in one process read them once.
read = cache(recording.read)
checkpoint = cache(lambda source, dtype: load(fetch(source), dtype))


def main(config: DictConfig) -> dict:
    folder, job = conf.output()
    settings, console = conf.to_plain(config), Console()
    tree, policy, sampling = (conf.build(config[k]) for k in ("tree", "policy", "sampling"))
    batch = settings["batch"]
    if type(batch) is not int or batch < 1:
        raise BadInput(f"batch must be a whole number of at least 1, got {batch}")
    about, answers = read(settings["recording"])
    base = Setting(settings["drafter_head"], shaped(tree, settings["shape"]), policy)
    drafter = conf.build(config.drafter)
    chosen = [
        s._replace(policy=calibrated(s.policy, drafter)) for s in ablation.expand(base, settings["grid"])
    ]
    for setting in chosen:
        ablation.variant_of(setting, about)
    fixed = ablation.fixed_settings(about, base.head, (1, *settings["fixed"])) if settings["fixed"] else []
    model = checkpoint(config.model.source, config.model.dtype)
    method = method_with(settings, base.head, model, sampling)
    belongs(about, method, base.head, settings["recording"])
    context = ablation.contexts(answers, about.new_tokens, base.tree, CAPACITY_STEP)
    table, source = table_for(
        model, method, conf.build(config.costs), points([*chosen, *fixed], batch, context), console
    )
    told = cost_table.describe(source)
    found: list[Outcome] = []
    with tracking.open_run(folder, settings, conf.build(config.tracking), job) as run:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("settings", total=len(chosen) + len(fixed))
            for group in (chosen, fixed):
                found += ablation.judge(
                    answers, about, group, table, context, batch, lambda n: progress.advance(bar, n)
                )
        if settings["oracle"]:
            found.append(ablation.perfect(answers, about, chosen[0], table, context, batch))
        write_atomic(folder / "replay.json", json.dumps(plain(ablation.as_json(found)), indent=1) + "\n")
        figures = summary(found[: len(chosen)], found[len(chosen) :])
        run.log({f"replay/{key}": value for key, value in figures.items()})
        run.summary({f"replay/{key}": value for key, value in figures.items()})
        charted = [
            {"setting": o.name, "kind": o.kind, "tau": o.tau, "ms_per_token": o.ms_per_token} for o in found
        ]
        run.scatter("acceptance_against_cost", charted, "ms_per_token", "tau")
    show(found, len(chosen), console, f"{len(answers)} answers, batch {batch}; {told}")
    console.print(f"run folder: {folder}", soft_wrap=True)
    return figures


def shaped(tree: TreeSpec, shape: list[int] | None) -> TreeSpec:
    """The tree with another frontier width and number of children."""
    if shape is None:
        return tree
    if len(shape) != 2:
        raise BadInput(f"shape must be a width and a number of children, like shape=[2,3]; got {shape}")
    return replace(tree, width=shape[0], children=shape[1])


def belongs(about: About, method: Method, head: str, where: str) -> None:
    """Raises BadInput if the recording is of another target, drafter or way of drawing."""
    mine = record.identity({Variant(head, 1, 1): method})
    for key, what in (("target", "target model"), ("sampling", "sampling")):
        if about.identity[key] != mine[key]:
            raise BadInput(
                f"{where} is a recording of another {what}; record this one with experiments.record"
            )
    if about.identity["heads"].get(head) not in (None, mine["heads"][head]):
        raise BadInput(
            f"{where} is a recording of another drafter (head {head}); record this one with experiments.record"
        )


def points(settings: Sequence[Setting], batch: int, context: Sequence[int]) -> dict[str, list[int]]:
    """What a cost table must hold to price all settings."""
    lists = [lists_for(s.tree, [batch], context) for s in settings]
    return {name: sorted({value for one in lists for value in one[name]}) for name in lists[0]}


def summary(chosen: Sequence[Outcome], others: Sequence[Outcome]) -> dict:
    """Figures of the best setting, and how it stands to the best fixed one and to the oracle."""
    best = max(chosen, key=lambda o: o.speedup)
    figures = {
        "tau": best.tau,
        "ms_per_token": best.ms_per_token,
        "speedup": best.speedup,
        "settings": len(chosen),
    }
    fixed = [o.speedup for o in others if o.kind == "fixed"]
    perfect = [o.speedup for o in others if o.kind == "oracle"]
    figures |= {"best_fixed_speedup": max(fixed)} if fixed else {}
    figures |= {"oracle_speedup": max(perfect)} if perfect else {}
    return figures


def show(found: Sequence[Outcome], count: int, console: Console, title: str) -> None:
    """The best of the settings under study, the best fixed ones, and the oracle."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("setting", overflow="fold")
    for name in ("speed-up", "tau", "ms/token", "levels", "rows", "draft ms", "verify ms"):
        table.add_column(name, justify="right")
    chosen = sorted(found[:count], key=lambda o: -o.speedup)
    fixed = sorted((o for o in found[count:] if o.kind == "fixed"), key=lambda o: -o.speedup)[:3]
    for o in (*chosen[:SHOWN], *fixed, *(o for o in found[count:] if o.kind == "oracle")):
        numbers = (o.tau, o.ms_per_token, o.levels, o.rows, o.first_ms + o.steps_ms, o.verify_ms)
        name = f"fixed {o.name}" if o in fixed else o.name
        table.add_row(name, f"{o.speedup:.3f}", *("–" if n != n else f"{n:.2f}" for n in numbers))
    console.print(table)
    if count > SHOWN:
        console.print(f"the best {SHOWN} of {count} settings; all are in replay.json", style="dim")


if __name__ == "__main__":
    conf.run_app(main, "replay")
