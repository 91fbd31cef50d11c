"""How far a drafter's path probabilities can be trusted, by depth, and a file that corrects them.

    python -m experiments.reliability method=eagle4 data.limit=40
    python -m experiments.reliability method=eagle4 recording=experiments/recordings/smollm2-135m

Rounds of every other prompt are counted; the rest judge the counts: expected calibration error before and after.
"""

from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle4 import answer, calibration, conf, recording, report_reliability, text, tracking
from eagle4.ablation import Setting, variant_of
from eagle4.answer import Limits
from eagle4.errors import BadInput
from eagle4.harness.reliability import reach
from eagle4.methods import build_method
from eagle4.policy_spec import PolicySpec
from eagle4.prompts import load_prompts
from eagle4.replay import tape, whole_trees
from eagle4.specs import DrafterSpec, TreeSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from eagle4.types import RoundInfo
from experiments.benchmark import PROMPTS


def main(config: DictConfig) -> dict:
    folder, job = conf.output()
    console, (drafter, tree) = Console(), (conf.build(config[key]) for key in ("drafter", "tree"))
    if not tree.depth or drafter.name == "none":
        raise BadInput(
            f"method {config.name!r} guesses nothing; choose one with a drafter that has probabilities"
        )
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        rounds = recorded(config, tree) if config.recording else decoded(config, drafter, tree, console)
        if len(rounds) < 2:
            raise BadInput("reliability needs at least 2 prompts: one to count, one to judge")
        taught = calibration.counted(rounds[::2], tree.depth)
        error = calibration.judged(taught, rounds[1::2])
        others = [calibration.believing(taught, info) for info in rounds[1::2]]
        whole = calibration.counted(rounds, tree.depth)
        about = {"method": config.name, "prompts": len(rounds), "checkpoint": drafter.checkpoint}
        output = Path(config.output or folder / "calibration.json")
        calibration.save_reliability(output, whole, about | {"recording": config.recording})
        plot = folder / "reliability.png"
        report_reliability.plot(
            calibration.counted(rounds[1::2], tree.depth), calibration.counted(others, tree.depth), plot
        )
        run.attach(plot)
        rows = [
            {
                "depth": d + 1,
                "nodes": int(whole.seen[d].sum()),
                "reached": float(np.asarray(reach(whole))[d]),
                "ece_before": error["before"][d],
                "ece_after": error["after"][d],
            }
            for d in range(tree.depth)
        ]
        for row in rows:
            run.log(row)
    console.print(table(rows, f"{config.name}: rounds of {len(rounds)} prompts"))
    console.print(f"{output}, {plot}", style="dim", soft_wrap=True)
    return {"ece_before": rows[0]["ece_before"], "ece_after": rows[0]["ece_after"]}


def recorded(config: DictConfig, tree: TreeSpec) -> list[RoundInfo]:
    """A round with its whole tree at every position of a recording, by answer."""
    about, answers = recording.read(config.recording)
    variant = variant_of(Setting(config.drafter_head, tree, PolicySpec()), about)
    return whole_trees(tape(answers, variant.name, tree.depth, tree.width, [0] * len(answers)), tree)


def decoded(config: DictConfig, drafter: DrafterSpec, tree: TreeSpec, console: Console) -> list[RoundInfo]:
    """The rounds of real decodes, every tree drafted and verified whole, by answer."""
    source, data, sampling = (conf.build(config[k]) for k in ("model", "data", "sampling"))
    path = list(data.path) if isinstance(data.path, tuple) else data.path or str(PROMPTS)
    prompts = load_prompts(path, data.limit)
    model = load(fetch(source.source), source.dtype)
    words = load_text(model.tokenizer)
    target = model.spec, sampling, model.params
    method = build_method(config.name, drafter, tree, PolicySpec(), config.verifier, *target)
    asked = [text.encode_chat(words, [{"role": "user", "content": p.turns[0]}]) for p in prompts]
    limits = Limits(data.max_new_tokens)
    capacity = max(answer.capacity_for([method.system], len(ids), data.max_new_tokens) for ids in asked)
    rounds = []
    for prompt, ids in zip(track(prompts, "decoding", console=console, transient=True), asked):
        seed = answer.seed_of(f"{sampling.seed}/{prompt.id}/0")
        parts = method.system, method.params, method.policy
        rounds.append(answer.answer(*parts, words, ids, seed, limits, capacity).rounds)
    return rounds


def table(rows: list[dict], title: str) -> Table:
    """By depth: nodes, how often a level was accepted, and the error before and after correction."""
    made = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("depth", "nodes", "accepted, given the level before", "ECE as claimed", "ECE corrected"):
        made.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row[k]:.3f}" for k in ("reached", "ece_before", "ece_after"))
        made.add_row(str(row["depth"]), str(row["nodes"]), *figures)
    return made


if __name__ == "__main__":
    conf.run_app(main, "reliability")
