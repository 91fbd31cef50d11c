"""How far a drafter's path probabilities can be trusted, by depth, and a file that corrects them.

    python -m experiments.reliability method=eagle4 data.limit=40

Rounds of every other prompt are counted; the rest judge the counts: expected calibration error before and after.
"""

from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle4 import answer, calibration, conf, report_reliability, text, tracking
from eagle4.answer import Limits
from eagle4.errors import BadInput
from eagle4.harness.reliability import reach
from eagle4.methods import build_method
from eagle4.policy_spec import PolicySpec
from eagle4.prompts import load_prompts
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from experiments.benchmark import PROMPTS


def main(config: DictConfig) -> None:
    folder, job = conf.output()
    source, data, sampling = (conf.build(config[k]) for k in ("model", "data", "sampling"))
    drafter, tree = (conf.build(config[key]) for key in ("drafter", "tree"))
    path = list(data.path) if isinstance(data.path, tuple) else data.path or str(PROMPTS)
    prompts = load_prompts(path, data.limit)
    if len(prompts) < 2:
        raise BadInput("reliability needs at least 2 prompts: one to count, one to judge")
    model = load(fetch(source.source), source.dtype)
    words, console = load_text(model.tokenizer), Console()
    target = model.spec, sampling, model.params
    method = build_method(config.name, drafter, tree, PolicySpec(), config.verifier, *target)
    if not tree.depth or drafter.name == "none":
        raise BadInput(
            f"method {config.name!r} guesses nothing; choose one with a drafter that has probabilities"
        )
    asked = [text.encode_chat(words, [{"role": "user", "content": p.turns[0]}]) for p in prompts]
    limits = Limits(data.max_new_tokens)
    capacity = max(answer.capacity_for([method.system], len(ids), data.max_new_tokens) for ids in asked)
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        rounds = []
        for prompt, ids in zip(track(prompts, "decoding", console=console, transient=True), asked):
            seed = answer.seed_of(f"{sampling.seed}/{prompt.id}/0")
            reply = answer.answer(
                method.system, method.params, method.policy, words, ids, seed, limits, capacity
            )
            rounds.append(reply.rounds)
        taught = calibration.counted(rounds[::2], tree.depth)
        error = calibration.judged(taught, rounds[1::2])
        others = [calibration.believing(taught, info) for info in rounds[1::2]]
        whole = calibration.counted(rounds, tree.depth)
        about = {"method": config.name, "prompts": len(prompts), "checkpoint": drafter.checkpoint}
        output = Path(config.output or folder / "calibration.json")
        calibration.save_reliability(output, whole, about)
        plot = folder / "reliability.png"
        report_reliability.plot(
            calibration.counted(rounds[1::2], tree.depth), calibration.counted(others, tree.depth), plot
        )
        run.attach(plot)
        table = Table(title=f"{config.name}: rounds of {len(prompts)} prompts", box=box.SIMPLE_HEAD)
        for name in ("depth", "nodes", "accepted, given the level before", "ECE as claimed", "ECE corrected"):
            table.add_column(name, justify="right")
        for d in range(tree.depth):
            row = {
                "depth": d + 1,
                "nodes": int(whole.seen[d].sum()),
                "reached": float(np.asarray(reach(whole))[d]),
                "ece_before": error["before"][d],
                "ece_after": error["after"][d],
            }
            run.log(row)
            figures = (f"{row[k]:.3f}" for k in ("reached", "ece_before", "ece_after"))
            table.add_row(str(d + 1), str(row["nodes"]), *figures)
    console.print(table)
    console.print(f"{output}, {plot}", style="dim", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "reliability")
