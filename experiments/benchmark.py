"""Methods against plain decoding: tokens/s, acceptance, losslessness, by category.

python -m experiments.benchmark
python -m experiments.benchmark method=prompt_lookup compare=[ar] data=full
python -m experiments.benchmark -m method=ar,prompt_lookup sampling.temperature=0,1
"""

import json
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle4 import bench, conf, metrics, report, tracking
from eagle4.answer import Limits
from eagle4.errors import BadInput
from eagle4.methods import Method, build_method
from eagle4.pricing import with_costs
from eagle4.prompts import load_prompts
from eagle4.summary import Row, Sample, summarise
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.text import load_text

PROMPTS = Path(__file__).parent / "prompts" / "default.jsonl"


def main(config: DictConfig) -> dict:
    folder, job = conf.output()
    source, data, sampling, ends = (conf.build(config[k]) for k in ("model", "data", "sampling", "decode"))
    parts = method_parts(config)
    phase_tokens = min(phase_tokens_of(config), data.max_new_tokens)
    prompts = load_prompts(
        list(data.path) if isinstance(data.path, tuple) else data.path or str(PROMPTS), data.limit
    )
    checkpoint = load(fetch(source.source), source.dtype)
    words = load_text(checkpoint.tokenizer)
    methods = [method_of(each, checkpoint, sampling) for each in parts]
    # Hydra hands over a backslash and an n where a newline was meant.
    limits = Limits(
        data.max_new_tokens, tuple(s.replace("\\n", "\n").replace("\\t", "\t") for s in ends.stops)
    )
    turns = 1 if data.turns == "first" else max(len(p.turns) for p in prompts)
    sizes = bench.capacities(methods, words, prompts, limits, turns)
    console = Console()
    capacities = sorted(set(sizes.values()))
    methods, sources = with_costs(checkpoint, methods, conf.build(config.costs), [1], capacities, console)
    samples: list[Sample] = []
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        try:
            with Progress(*columns, console=console) as progress:
                bar = progress.add_task("loading", total=len(prompts))

                def told(what: str) -> None:
                    progress.update(bar, description=what)

                for new in bench.measure(methods, words, prompts, limits, turns, sizes, told):
                    samples += new
                    write_rounds(folder / "rounds.jsonl", new)
                    for sample in new:
                        run.log(record(sample))
                    progress.advance(bar)
                if phase_tokens:
                    samples = bench.time_phases(methods, words, prompts, samples, phase_tokens, told)
        finally:
            figures = {}
            if samples:
                figures = finish(run, samples, methods[0].name, console, len(prompts), sources, config.name)
    return figures


def method_parts(config: DictConfig) -> list[dict]:
    """Plain decoding first, then the method under study and those of `compare`, each once."""
    chosen = conf.methods_of(config)
    names = [parts["name"] for parts in chosen]
    return [chosen.pop(names.index("ar")) if "ar" in names else conf.compose_method("ar"), *chosen]


def phase_tokens_of(config: DictConfig) -> int:
    tokens = config.phase_tokens
    if not isinstance(tokens, int) or tokens < 0:
        raise BadInput(f"phase_tokens must be a whole number, 0 for no phase times, got {tokens!r}")
    return tokens


def method_of(parts: dict, checkpoint, sampling) -> Method:
    drafter, tree, policy = (conf.build(parts[key]) for key in ("drafter", "tree", "policy"))
    spec, params = checkpoint.spec, checkpoint.params
    return build_method(parts["name"], drafter, tree, policy, parts["verifier"], spec, sampling, params)


def record(sample: Sample) -> dict:
    """A sample as one line of metrics.jsonl, under `phase/quantity_unit` names."""
    rounds = len(sample.rounds.num_accepted)
    return {
        "method": sample.method,
        "prompt_id": sample.prompt_id,
        "category": sample.category,
        "turn": sample.turn,
        "prefill/time_s": sample.prefill_s,
        "decode/time_s": sample.decode_s,
        "decode/tokens": sample.tokens,
        "decode/rounds": rounds,
        "decode/tokens_per_s": sample.tokens / sample.decode_s if sample.decode_s else None,
        "decode/tau": metrics.tau(sample.rounds) if rounds else None,
        "verify/identical": sample.identical,
        "verify/ties": sample.ties,
    }


def write_rounds(path: Path, samples: list[Sample]) -> None:
    """Append every round's RoundInfo, one line each."""
    with path.open("a") as file:
        for sample in samples:
            head = {"method": sample.method, "prompt_id": sample.prompt_id, "turn": sample.turn}
            for i, row in enumerate(zip(*sample.rounds)):
                info: dict = {name: int(value) for name, value in zip(metrics.Rounds._fields, row)}
                if sample.predicted_ms is not None:
                    info["predicted_ms"] = round(float(sample.predicted_ms[i]), 3)
                file.write(json.dumps(head | {"round": i} | info) + "\n")


def finish(
    run: tracking.Run,
    samples: list,
    baseline: str,
    console: Console,
    total: int,
    sources: dict[str, str],
    studied: str,
) -> dict:
    """Table, summary.json and plot of whatever was measured; where costs are from, and how far off they were. Returns
    the figures of the method under study."""
    rows = summarise(samples, [s for s in samples if s.method == baseline])
    report.print_table(rows, console)
    report.write_summary(rows, run.folder / "summary.json")
    report.plot_summary(rows, run.folder / "summary.png")
    run.attach(run.folder / "summary.png")
    for row in rows:
        if row.category == "all":
            if row.method in sources and row.predicted_ms is not None:
                told = f"{row.predicted_ms:.1f} ms a round predicted, {row.round_ms:.1f} taken"
                console.print(f"{row.method}: {sources[row.method]}; {told}", style="dim", soft_wrap=True)
            fields = (
                "tokens_per_s",
                "tau",
                "speedup_vs_ar",
                "greedy_identical",
                "ties",
                "predicted_ms",
                "round_ms",
            )
            run.summary({f"{row.method}/{field}": getattr(row, field) for field in fields})
    whole = {row.method: figures_of(row) for row in rows if row.category == "all"}
    charted = [{"method": name, **figures} for name, figures in whole.items()]
    run.scatter("acceptance_against_cost", charted, "ms_per_token", "tau")
    run.rounds()
    done = len({s.prompt_id for s in samples})
    if done < total:
        console.print(f"interrupted: kept {done} of {total} prompts")
    console.print(f"run folder: {run.folder}", soft_wrap=True)
    return whole.get(studied, {})


def figures_of(row: Row) -> dict:
    """What a sweep's table shows, and what a sweeper may be told."""
    speed = row.tokens_per_s
    cost = 1e3 / speed if speed else None
    return {"tau": row.tau, "ms_per_token": cost, "speedup": row.speedup_vs_ar, "tokens_per_s": speed}


if __name__ == "__main__":
    conf.run_app(main, "benchmark")
