"""Many jobs of one experiment: what each left, what goes on after a stop, and one table in the end.

A sweep's folder holds a folder a job, `<number>_<slug of its overrides>`. A job's state is in its status.json and its
figures in results.json, whichever process it ran in, so the sweep's verdict is read from there.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from eagle4.errors import BadInput
from eagle4.files import plain, write_atomic
from eagle4.tracking import read_status, write_status

RESULTS, SWEEP = "results.json", "sweep.json"
SHOWN = ("speedup", "tau", "ms_per_token", "tau_sim", "tokens_per_s")
ENDED: list[Path] = []  # sweeps that ended in this process: Hydra gives a callback no other way to answer


class JobLine(NamedTuple):
    """A job as the sweep's table has it. `state`: finished, failed, interrupted, running (lost) or missing."""

    number: int
    overrides: list[str]
    state: str
    folder: str
    results: dict[str, Any]
    error: str | None


class SweepEnd(Callback):
    """Hydra's hook at the end of a sweep, in the process that was started; every launcher and sweeper has it."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        lines = jobs(folder)
        write_atomic(folder / SWEEP, json.dumps([line._asdict() for line in lines], indent=1) + "\n")
        console = Console()
        console.print(table(lines))
        for line in lines:
            if line.error is not None:
                told = f"job {line.number} {line.state}: {first_line(line.error)}"
                console.print(told, highlight=False, markup=False, soft_wrap=True)
        console.print(f"sweep folder: {folder}", highlight=False, soft_wrap=True)
        ENDED.append(folder)


def take_resume(arguments: Sequence[str]) -> list[str]:
    """The command line with `--resume <folder>` as Hydra's own override. Raises BadInput for a folder that is no
    sweep."""
    kept, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
            continue
        folder = word.partition("=")[2] or (rest.pop(0) if rest else "")
        if not folder or not Path(folder).is_dir():
            raise BadInput(
                f"--resume needs the folder of a sweep, and {folder!r} is none; it lies under runs/"
            )
        if not {"-m", "--multirun"} & {*arguments}:
            raise BadInput("--resume goes on with a sweep; give -m and the sweep's own overrides too")
        kept.append(f"hydra.sweep.dir={folder}")
    return kept


def finished_before(folder: Path) -> dict[str, Any] | None:
    """Figures of a job that this sweep has finished already, by its overrides; None if it must run.

    What an earlier try of it left half done is removed.
    """
    name = folder.name.partition("_")[2]
    for other in sorted(folder.parent.glob(f"*_{glob_safe(name)}")):
        if read_status(other).get("state") == "finished":
            if other != folder:
                shutil.rmtree(folder, ignore_errors=True)
            path = other / RESULTS
            return json.loads(path.read_text("utf-8")) if path.exists() else {}
    for left in folder.iterdir() if folder.is_dir() else ():
        if left.name != ".hydra":
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return None


def glob_safe(name: str) -> str:
    return "".join(f"[{c}]" if c in "[]*?" else c for c in name)


def keep_results(folder: Path, results: Any) -> dict[str, Any]:
    """Write what a job returned, a flat dict of figures or nothing, and that it finished if it did not say so."""
    figures = plain(results) if isinstance(results, dict) else {}
    write_atomic(folder / RESULTS, json.dumps(figures, indent=1) + "\n")
    if read_status(folder).get("state") is None:
        write_status(folder, "finished")
    return figures


def objectives(config: DictConfig, figures: dict[str, Any]) -> Any:
    """What a sweeper is told of a finished job: the figures that `objectives` names, one or several."""
    names = config.get("objectives") or []
    if not names:
        return None
    values = [figures.get(name) for name in names]
    if any(value is None for value in values):
        return None
    return values[0] if len(values) == 1 else tuple(values)


def jobs(folder: Path) -> list[JobLine]:
    """Every job of a sweep, by number."""
    lines = []
    for path in sorted((p for p in folder.iterdir() if p.is_dir()), key=number_of):
        if number_of(path) < 0:
            continue
        status, given = read_status(path), path / ".hydra" / "overrides.yaml"
        overrides = list(OmegaConf.load(given)) if given.exists() else []
        results = json.loads((path / RESULTS).read_text("utf-8")) if (path / RESULTS).exists() else {}
        error = status.get("error")
        lines.append(
            JobLine(
                number_of(path),
                [str(o) for o in overrides],
                status.get("state", "missing"),
                path.name,
                results,
                error,
            )
        )
    return lines


def number_of(path: Path) -> int:
    """A job's number, from its folder's name; −1 for other folders."""
    number = path.name.partition("_")[0]
    return int(number) if number.isdigit() else -1


def verdict(folders: Sequence[Path]) -> int:
    """Exit status of sweeps: 0, 2 if only bad input made jobs fail, 1 for anything else."""
    bad = [line for folder in folders for line in jobs(folder) if line.state != "finished"]
    if not bad:
        return 0
    return 2 if all((line.error or "").startswith("BadInput") for line in bad) else 1


def table(lines: Sequence[JobLine]) -> Table:
    """All jobs: what differs between them, how they ended, and their figures."""
    made = Table(box=box.SIMPLE_HEAD)
    known = dict.fromkeys(key for line in lines for key in line.results)
    shown = [key for key in SHOWN if key in known] or list(known)[:4]
    shared = set.intersection(*(set(line.overrides) for line in lines)) if len(lines) > 1 else set()
    for name in ("job", "overrides", "state", *shown):
        made.add_column(name, justify="left" if name in ("overrides", "state") else "right", overflow="fold")
    for line in lines:
        own = " ".join(o for o in line.overrides if o not in shared)
        made.add_row(str(line.number), own, line.state, *(figure(line.results.get(key)) for key in shown))
    return made


def first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


def figure(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
