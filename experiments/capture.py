"""The target's features over stored answers, once, for all drafters that are trained on them.

python -m experiments.capture data.path=prompts.jsonl

Stop it at any time; the next run goes on with the documents that are not captured yet.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eagle4 import conf
from eagle4.drafters.eagle_net import default_taps
from eagle4.errors import BadInput
from eagle4.prompts import load_prompts
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from eagle4.train import capture, features, responses
from eagle4.train.capture import Turn
from eagle4.train.step import capture_chunk


def main(config: DictConfig) -> None:
    settings, console = conf.to_plain(config), Console()
    store, folder = Path(config.store), Path(config.features)
    check(settings)
    if not responses.shards(store):
        raise BadInput(f"there are no responses in {store}; run python -m experiments.synthesize first")
    responses.claim(store, config.model.source)
    source = conf.build(config.model)
    prompts = [] if config.data.path is None else load_prompts(settings["data"]["path"], config.data.limit)
    model = load(fetch(source.source), source.dtype)
    spec, words = model.spec, load_text(model.tokenizer)
    if config.max_length > spec.max_position:
        raise BadInput(
            f"max_length={config.max_length} exceeds the model's {spec.max_position} positions; lower it"
        )
    taps = capture.require_taps(settings["taps"] or default_taps(spec.num_layers), spec.num_layers)
    turns, counts = capture.documents(words, responses.read_responses(store), prompts, config.max_length)
    console.print(summary(turns, counts), highlight=False, soft_wrap=True)
    mark = features.fingerprint(source.source, spec, model.params, taps)
    done = features.start(folder, mark, config.held_out, config.max_length)
    todo = [turn for turn in turns[: config.limit] if turn.name not in done]
    room = capture.room(folder, mark, sum(len(turn.tokens) for turn in todo))
    console.print(
        f"{len(done)} documents are done, {len(todo)} to do: {room.bytes_per_token} bytes a token, "
        f"{room.bytes / 1e9:.2f} GB in all, {room.free_bytes / 1e9:.2f} GB free",
        highlight=False,
        soft_wrap=True,
    )
    left_out = fill(console, folder, model.params, spec, taps, todo, config.shard_tokens)
    if left_out:
        console.print(
            f"left out, a feature is infinite or no number: {', '.join(left_out)}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"{folder}", style="dim", soft_wrap=True)


def check(settings: dict[str, Any]) -> None:
    """Raises BadInput for a number out of range."""
    for name in ("max_length", "shard_tokens", "limit"):
        value = settings[name]
        if not (type(value) is int and value >= 1) and not (name == "limit" and value is None):
            raise BadInput(f"{name} must be a whole number of at least 1, got {value}")
    if type(settings["held_out"]) not in (int, float) or not 0 <= settings["held_out"] < 1:
        raise BadInput(f"held_out must be a share in [0, 1), got {settings['held_out']}")
    if settings["taps"] is not None and not isinstance(settings["taps"], list):
        raise BadInput(f"taps must be a list, as in taps=[2,15,27], or null; got {settings['taps']}")


def summary(turns: list[Turn], counts: capture.Counts) -> str:
    """What the responses gave."""
    tokens = sum(len(turn.tokens) for turn in turns)
    answer = sum(int(turn.supervised.sum()) for turn in turns)
    return (
        f"{len(turns)} documents, {tokens} tokens, {answer} of them answers; {counts.cropped} cropped. Not used: "
        f"{counts.without_prompt} without their prompt, {counts.repeated} repeated, "
        f"{counts.without_answer} without an answer in reach"
    )


def fill(console, folder, params, spec, taps, todo, shard_tokens) -> list[str]:
    """Capture with a progress bar over tokens. Returns the names of documents left out."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=300) as progress:
        bar = progress.add_task("tokens", total=sum(len(turn.tokens) for turn in todo), rate="")

        def told(tokens: int) -> None:
            progress.advance(bar, tokens)
            speed = progress.tasks[0].speed
            progress.update(bar, rate=f"{speed:.0f} tok/s" if speed else "")

        return capture.capture(folder, capture_chunk, params, spec, taps, todo, shard_tokens, told)


if __name__ == "__main__":
    conf.run_app(main, "capture")
