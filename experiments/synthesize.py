"""Training data from the target itself: answers to given prompts, or to prompts that it writes.

python -m experiments.synthesize data.path=prompts.jsonl target_tokens=1000000
python -m experiments.synthesize                      # no data at all: the target writes the prompts too

Stop it at any time; the next run goes on with the prompts that have no answer yet.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eagle4 import conf
from eagle4.errors import BadInput
from eagle4.prompts import load_prompts
from eagle4.serve import Shape
from eagle4.specs import SamplingSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text
from eagle4.train import synthesize
from eagle4.train.responses import Response, append_shard, claim, count, read_responses


def main(config: DictConfig) -> None:
    store, console = Path(config.store), Console()
    for name in ("target_tokens", "shard_responses", "batch", "refill", "max_new_tokens", "capacity"):
        if type(config[name]) is not int or config[name] < 1:
            raise BadInput(f"{name} must be a whole number of at least 1, got {config[name]}")
    claim(store, config.model.source)
    before = list(read_responses(store))
    have = sum(len(r.answer) for r in before)
    shard: list[Response] = []
    try:
        for response in responses(config, {r.prompt_id for r in before}, have, console):
            shard.append(response)
            if len(shard) == config.shard_responses:
                append_shard(store, shard)
                shard = []
    finally:  # an interrupt keeps what is finished
        if shard:
            append_shard(store, shard)
    console.print(f"{store}: %d responses, %d answer tokens, %d bytes" % count(store))


def responses(config: DictConfig, done: set[str], have: int, console: Console) -> Iterator[Response]:
    """New responses until the store holds `target_tokens`, with a progress bar over tokens."""
    checkpoint = load(fetch(config.model.source), config.model.dtype)
    words = load_text(checkpoint.tokenizer)
    weights, spec = checkpoint.params, checkpoint.spec
    sampling = conf.build(config.sampling)
    shape = Shape(config.batch, config.capacity, config.refill)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("answer tokens", total=config.target_tokens, completed=have, rate="")

        def told(tokens: int) -> None:
            progress.advance(bar, tokens)
            speed = progress.tasks[0].speed
            progress.update(bar, rate=f"{speed:.0f} tok/s" if speed else "")

        for conversations, written in blocks(config, weights, spec, words, shape, done):
            args = (weights, spec, words, conversations, sampling, config.max_new_tokens, shape, told)
            for response in synthesize.answers(*args):
                have += len(response.answer)
                yield response._replace(written=written.get(response.prompt_id, []))
                if have >= config.target_tokens:
                    return


def blocks(config, weights, spec, words, shape, done):
    """(prompt id, turn) pairs to answer, and the ids of the turns the target wrote itself."""
    if config.data.path is not None:
        prompts = load_prompts(config.data.path, config.data.limit)
        random.Random(config.sampling.seed).shuffle(prompts)
        yield synthesize.turns_of(prompts, done), {}
        return
    first = 1 + max((int(name.split("/")[1]) for name in done if name.startswith("written/")), default=-1)
    while True:
        writing = SamplingSpec(temperature=config.writing_temperature, seed=config.sampling.seed)
        args = (weights, spec, words, first, config.writing_block, writing, config.max_prompt_tokens, shape)
        turns = list(synthesize.written_turns(*args))
        first += config.writing_block
        yield [(name, turn) for name, _, turn in turns], {name: ids for name, ids, _ in turns}


if __name__ == "__main__":
    conf.run_app(main, "synthesize")
