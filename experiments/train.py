"""Train a drafter of the EAGLE family on captured features.

python -m experiments.train drafter=eagle3_1
python -m experiments.train drafter=eagle1 train=eagle1
python -m experiments.train drafter=eagle3_1 train.share=0.25 saves=runs/train/quarter

Stop it at any time; the same command goes on where it was, with the same numbers.
"""

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eagle4 import conf, tracking
from eagle4.checkpoint import load_drafter, save_drafter
from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from eagle4.train import batches, card, features, loop, start
from eagle4.train.loop import Setup


def main(config: DictConfig) -> dict:
    folder, job = conf.output()
    console = Console()
    setup, source = prepare(config)
    saves = Path(config.saves)
    size = batches.packing(setup.store, setup.train.length, setup.train.seed, setup.train.share)
    console.print(
        f"{size.documents} documents, {size.tokens} tokens an epoch, {size.supervised:.0%} of them supervised, "
        f"rows {size.efficiency:.0%} full; {setup.train.tokens / size.tokens:.1f} epochs",
        highlight=False,
    )
    last = {}
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}")
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            bar = progress.add_task("training", total=setup.train.batches, said="")
            state = None
            for record, now in loop.run(setup, str(saves / "saves")):
                state = now
                run.log(record, step=record["step"])
                last |= record
                progress.update(bar, completed=record["step"], said=told(last))
        if state is None:
            raise BadInput(f"{saves} holds a finished run; choose another saves=, or remove it to start anew")
        output = Path(config.output or saves / "drafter")
        text = card.write(setup, size, last, source, Path(config.saves).name)
        save_drafter(output, loop.result(setup, state), setup.target, setup.target_params, text)
        run.summary(last)
    console.print(f"{output}", soft_wrap=True)
    figures = {
        key.partition("/")[2]: value
        for key, value in last.items()
        if key.startswith(("validate/", "decode/"))
    }
    return {"tokens": size.tokens, **figures}


def prepare(config: DictConfig) -> tuple[Setup, str]:
    """Everything a run needs, checked before anything is trained."""
    source, train, drafter = (conf.build(config[key]) for key in ("model", "train", "drafter"))
    if drafter.name != "eagle" or drafter.eagle is None:
        raise BadInput(
            "only drafters of the EAGLE family are trained here; use drafter=eagle1, eagle3 or eagle3_1"
        )
    model = load(fetch(source.source), source.dtype)
    words = load_text(model.tokenizer)
    spec = eagle_net.complete(drafter.eagle, model.spec)
    folder = Path(config.features)
    taps = spec.taps or features.stored_taps(folder)
    store = features.open_store(folder, features.fingerprint(source.source, model.spec, model.params, taps))
    counts = batches.token_counts(store, model.spec.vocab_size, train.share)
    frozen, params = start.begin(spec, train, model.spec, model.params, store, counts)
    if config.start_from is not None:
        given = load_drafter(config.start_from, model.spec, model.params)
        if given.spec != spec:
            raise BadInput(f"start_from={config.start_from} is a drafter of another spec than drafter.eagle")
        params = {k: v for k, v in given.params.items() if k != "draft_ids"}
    prompts = batches.held_out_prompts(store, train.decode_prompts)
    return (
        Setup(spec, train, model.spec, model.params, frozen, store, params, prompts, words.stop_ids),
        source.source,
    )


def told(record: dict) -> str:
    """The last figures, for the progress bar."""
    parts = [f"loss {record['train/loss']:.3f}" if "train/loss" in record else ""]
    if "train/tokens_per_s" in record:
        parts.append(f"{record['train/tokens_per_s']:.0f} tok/s")
    for name, label in (("validate/tau_sim", "τ_sim"), ("decode/tau", "τ")):
        if name in record:
            parts.append(f"{label} {record[name]:.2f}")
    return ", ".join(filter(None, parts))


if __name__ == "__main__":
    conf.run_app(main, "train")
