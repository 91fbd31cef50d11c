"""Record once, judge everything: the target's answers with the largest draft tree at every position.

python -m experiments.record data.limit=16 data.max_new_tokens=48
python -m experiments.record heads=[own,r64c128,r64c256] shapes=[[1,1],[2,3]] depth=6 output=runs/recordings/mine

Stop it at any time; the next run goes on with the prompts that are missing.
"""

import shutil
import sys
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eagle4 import answer, conf, text
from eagle4.errors import BadInput
from eagle4.methods import Method, build_method, with_head
from eagle4.policy_spec import PolicySpec
from eagle4.prompts import load_prompts
from eagle4.record import Request, identity, largest, record, size_bytes
from eagle4.recording import About, Variant, start, write_group
from eagle4.specs import TreeSpec
from eagle4.target.hub import fetch
from eagle4.target.load import Checkpoint, load
from eagle4.text import load_text
from experiments.benchmark import PROMPTS


def main(config: DictConfig) -> None:
    settings, console = conf.to_plain(config), Console()
    variants = variants_of(settings)
    source, data, sampling = (conf.build(config[k]) for k in ("model", "data", "sampling"))
    path = list(data.path) if isinstance(data.path, tuple) else data.path or str(PROMPTS)
    prompts = load_prompts(path, data.limit)
    model = load(fetch(source.source), source.dtype)
    words, depth, new = load_text(model.tokenizer), settings["depth"], data.max_new_tokens
    methods = {v: largest(method_with(settings, v.head, model, sampling), v, depth) for v in variants}
    about = About(identity(methods), depth, new, variants, " ".join(sys.argv[1:]))
    folder = Path(settings["output"])
    done = start(folder, about)
    asked = []
    for p in prompts:
        ids = text.encode_chat(words, [{"role": "user", "content": p.turns[0]}])
        asked.append(Request(p.id, p.category, ids, answer.seed_of(f"{sampling.seed}/{p.id}/0")))
    todo = sorted((r for r in asked if r.prompt_id not in done), key=lambda r: len(r.ids))
    size, free = size_bytes(len(todo), new, depth, variants), shutil.disk_usage(folder).free
    told = f"{len(done)} answers are recorded, {len(todo)} to do; at most {size / 1e6:.1f} MB before compression, "
    console.print(f"{told}{free / 1e9:.1f} GB free", highlight=False, soft_wrap=True)
    if size > free:
        raise BadInput(
            f"{folder} has {free / 1e6:.0f} MB free and the recording may take {size / 1e6:.0f}; make room"
        )
    groups = [todo[i : i + settings["group"]] for i in range(0, len(todo), settings["group"])]
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("positions", total=len(groups) * (new + depth - 1))
        for i, group in enumerate(groups):
            systems = [m.system for m in methods.values()]
            capacity = max(answer.capacity_for(systems, len(r.ids), new + depth) for r in group)
            stops = words.stop_ids
            answers = record(
                methods, group, new, capacity, stops, settings["probs"] or (), lambda _: progress.advance(bar)
            )
            write_group(folder, answers)
            progress.update(bar, completed=(i + 1) * (new + depth - 1))
    console.print(f"recording: {folder}", soft_wrap=True)


def variants_of(settings: dict) -> tuple[Variant, ...]:
    """Every head with every shape. Raises BadInput for numbers out of range."""
    for name in ("depth", "group"):
        if type(settings[name]) is not int or settings[name] < 1:
            raise BadInput(f"{name} must be a whole number of at least 1, got {settings[name]}")
    shapes, heads = settings["shapes"], settings["heads"]
    if not shapes or any(not isinstance(s, list) or len(s) != 2 for s in shapes):
        raise BadInput(
            f"shapes must list pairs of width and children, like shapes=[[1,1],[2,3]]; got {shapes}"
        )
    if not heads or not isinstance(heads, list):
        raise BadInput(f"heads must list heads, like heads=[own,r64c256]; got {heads}")
    if odd := [head for head in settings["probs"] or () if head not in heads]:
        raise BadInput(f"probs names {', '.join(odd)}, which is not among heads={heads}")
    return tuple(Variant(head, *shape) for head in dict.fromkeys(heads) for shape in shapes)


def method_with(settings: dict, head: str, model: Checkpoint, sampling) -> Method:
    """The configured drafter with this head."""
    drafter = conf.build(settings["drafter"])
    if drafter.name != "eagle":
        raise BadInput(
            f"drafter {drafter.name!r} has no network whose trees could be recorded; use method=eagle1, eagle3, "
            "eagle3_1 or eagle4"
        )
    drafter = with_head(drafter, head)
    spec, params, verifier = model.spec, model.params, settings["verifier"]
    return build_method(settings["name"], drafter, TreeSpec(), PolicySpec(), verifier, spec, sampling, params)


if __name__ == "__main__":
    conf.run_app(main, "record")
