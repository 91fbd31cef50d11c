"""Which verifier accepts most: expected tokens per round on the same target and drafter distributions.

    python -m experiments.verifiers children=4

Prints a table per tree and leaves verifiers.json and verifiers.png in the run's folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from eagle4 import conf
from eagle4.errors import BadInput
from eagle4.files import plain, write_atomic
from eagle4.report import COLOURS
from eagle4.tree.topology import check_parents
from eagle4.types import Proposal
from eagle4.verify import VERIFIERS, check_proposal
from eagle4.verify import expected as ex

# How each verifier's children are made: the likeliest for certain, drawn without replacement, or independently.
DRAFTING = {
    "point_mass": "picks",
    "rejection": "distinct",
    "multi_round": "repeats",
    "k_sequential": "repeats",
}
BOUNDS = {"bound, distinct draws": "distinct", "bound, independent draws": "repeats"}


def settings(config: DictConfig, rng: np.random.Generator) -> Iterator[tuple[dict[str, Any], ex.Pairs]]:
    """The recorded pairs as one setting, or synthetic ones for every concentration and closeness."""
    if config.record is not None:
        yield {"record": str(config.record)}, read_record(Path(config.record), config.pairs)
        return
    for concentration in config.concentration:
        shape = [concentration] * config.vocab
        p, r = rng.dirichlet(shape, config.pairs), rng.dirichlet(shape, config.pairs)
        for closeness in config.closeness:
            name = {"concentration": concentration, "closeness": closeness}
            q = (closeness * p + (1 - closeness) * r) ** config.sharpness
            yield name, ex.compact(p, q / q.sum(-1, keepdims=True))


def read_record(path: Path, most: int) -> ex.Pairs:
    """p and q of an .npz, checked; `most` rows of them, evenly spaced."""
    try:
        with np.load(path) as arrays:
            p, q = (np.asarray(arrays[name], np.float64) for name in ("p", "q"))
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"record {str(path)!r} is no .npz with arrays p and q [pairs, vocabulary]") from error
    if p.ndim != 2 or p.shape != q.shape or not len(p):
        raise BadInput(f"record has p {p.shape} and q {q.shape}; both must be [pairs, vocabulary]")
    ids = jnp.broadcast_to(jnp.arange(p.shape[1]), (1, *p.shape))
    for name, x in (("p", p), ("q", q)):
        try:
            check_proposal(Proposal(ids, jnp.asarray(x[None], jnp.float32)), p.shape[1])
        except BadInput as error:
            raise BadInput(f"record {str(path)!r}, array {name}: {error}") from error
    if (size := (q > 0).sum(-1).max()) > 256:
        raise BadInput(
            f"record proposes {size} tokens in one row; keep the likeliest 256 of q and renormalise"
        )
    rows = np.unique(np.linspace(0, len(p) - 1, most).round().astype(int))
    return ex.compact(p[rows], q[rows])


def check(config: DictConfig) -> None:
    """Refuse numbers that no tree or distribution has."""
    for name, low in (("vocab", 2), ("pairs", 1), ("depth", 1), ("children", 1), ("samples", 1)):
        if config[name] < low:
            raise BadInput(f"{name} must be at least {low}, got {config[name]}")
    if not config.concentration or min(config.concentration) <= 0:
        raise BadInput(f"concentration must list positive numbers, got {list(config.concentration)}")
    if not config.closeness or min(config.closeness) < 0 or max(config.closeness) > 1:
        raise BadInput(f"closeness must list numbers in 0..1, got {list(config.closeness)}")
    if not config.sharpness > 0:
        raise BadInput(f"sharpness must be positive (1 = off, below 1 flattens q), got {config.sharpness}")
    if config.record is None and config.children > config.vocab:
        raise BadInput(
            f"children={config.children} different tokens need vocab of at least as many, got {config.vocab}"
        )
    try:
        check_parents(config.parents, 64)
    except BadInput as error:
        raise BadInput(f"parents={list(config.parents)}: {error}") from None


def compare(config: DictConfig, pairs: ex.Pairs, rng: np.random.Generator) -> dict[str, dict[str, float]]:
    """Expected tokens per round by tree and verifier."""
    parents = list(config.parents)
    counts = {1, config.children, *(parents.count(node) for node in set(parents) - {-1})}
    most = max(counts)
    drawn = {
        "picks": ex.picks(pairs, most),
        "distinct": ex.draws(pairs, most, False, config.samples, rng),
        "repeats": ex.draws(pairs, most, True, config.samples, rng),
    }
    chains = np.stack([rng.permutation(len(pairs.p)) for _ in range(config.depth)], axis=1)
    result: dict[str, dict[str, float]] = {"chain": {}, "level": {}, "tree": {}}
    for name, drafting in DRAFTING.items():
        law = VERIFIERS[name].law
        accept = ex.rank_acceptance(law, pairs, drawn[drafting], sorted(counts))
        if name in ("point_mass", "rejection"):
            first = accept[1][chains, 0]
            result["chain"][name] = float(1 + np.cumprod(first, axis=1).sum(1).mean())
        result["level"][name] = float(1 + accept[config.children].sum(-1).mean())
        result["tree"][name] = ex.tree_tokens(parents, {m: a.mean(0) for m, a in accept.items()})
    result["chain"]["block"] = float(ex.block_tokens(pairs, chains, config.samples, rng).mean())
    for name, drafting in BOUNDS.items():
        tokens = drawn[drafting].tokens[..., : config.children]
        bound = ex.transport_bound(pairs, ex.Siblings(tokens, drawn[drafting].weight))
        result["level"][name] = float(1 + bound.mean())
    return result


def print_tables(rows: list[dict[str, Any]], titles: dict[str, str], console: Console) -> None:
    """A table per tree: a line per setting, a column per verifier."""
    for tree, title in titles.items():
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in (*rows[0]["setting"], "overlap", *rows[0][tree]):
            table.add_column(name.replace(", ", ",\n"), justify="right")
        for row in rows:
            values = (row["overlap"], *row[tree].values())
            table.add_row(*map(str, row["setting"].values()), *(f"{value:.3f}" for value in values))
        console.print(table)
    console.print(
        "expected tokens per round, the target's own token included; overlap = Σ min(p, q)", style="dim"
    )


def plot(rows: list[dict[str, Any]], titles: dict[str, str], path: Path) -> None:
    """Tokens per round against overlap: a column per tree, a row per concentration."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(row["setting"].get("concentration") for row in rows))
    figure = Figure(figsize=(11, 1.2 + 2.8 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), len(titles), squeeze=False)
    names = list(dict.fromkeys(name for tree in titles for name in rows[0][tree] if name not in BOUNDS))
    colours = dict(zip(names, COLOURS[1:])) | dict(zip(BOUNDS, ("0.1", "0.6")))
    handles = {}
    for (i, group), (j, tree) in ((a, b) for a in enumerate(groups) for b in enumerate(titles)):
        mine = [row for row in rows if row["setting"].get("concentration") == group]
        for name in mine[0][tree]:
            style = (0, (4, 2)) if name in BOUNDS else "-"
            (handles[name],) = panels[i, j].plot(
                [row["overlap"] for row in mine], [row[tree][name] for row in mine], linestyle=style, linewidth=1.4,
                marker="none" if name in BOUNDS else "o", markersize=4, color=colours[name],
            )  # fmt: skip
        title = titles[tree] if group is None else f"{titles[tree]}\nconcentration {group}"
        panels[i, j].set_title(title, fontsize=9, loc="left")
        panels[i, j].grid(color="0.9", linewidth=0.6)
        panels[i, j].spines[["top", "right"]].set_visible(False)
        panels[-1, j].set_xlabel("overlap Σ min(p, q)")
        panels[i, 0].set_ylabel("expected tokens per round")
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4, frameon=False)
    part = path.with_suffix(".part")
    figure.savefig(part, dpi=160, format="png")
    part.replace(path)


def main(config: DictConfig) -> None:
    check(config)
    rng = np.random.default_rng(config.seed)
    rows = []
    for setting, pairs in settings(config, rng):
        overlap = float(np.minimum(pairs.p, pairs.q).sum(-1).mean())
        common = {"setting": setting, "sharpness": config.sharpness, "overlap": overlap}
        rows.append({**common, **compare(config, pairs, rng)})
    titles = {
        "chain": f"chain of {config.depth}",
        "level": f"one level of {config.children} child{'ren' * (config.children > 1)}",
        "tree": f"tree of {len(config.parents) - 1} nodes",
    }
    folder, _ = conf.output()
    write_atomic(folder / "verifiers.json", json.dumps(plain(rows), indent=1, ensure_ascii=False) + "\n")
    plot(rows, titles, folder / "verifiers.png")
    console = Console()
    print_tables(rows, titles, console)
    console.print(f"{folder}/verifiers.json, verifiers.png", style="dim", soft_wrap=True)


if __name__ == "__main__":
    conf.run_app(main, "verifiers")
