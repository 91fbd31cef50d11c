"""Many jobs of one experiment: what each left, what goes on after a stop, and one table in the end.

A sweep's folder holds a folder a job, `<number>_<slug of its overrides>`. A job's state is in its status.json and its
figures in results.json, whichever process it ran in, so the sweep's verdict is read from there.
"""

import json
import re
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from eagle4.errors import BadInput
from eagle4.files import plain, write_atomic
from eagle4.tracking import read_status, write_status

RESULTS, SWEEP = "results.json", "sweep.json"
SHOWN = ("speedup", "tau", "ms_per_token", "tau_sim", "tokens_per_s")
# Sweeps of this process, those begun with the job folders that were finished by then: Hydra gives a callback no
# other way to answer.
STARTED: dict[Path, set[str]] = {}
ENDED: list[Path] = []


class JobLine(NamedTuple):
    """A job as the sweep's table has it. `state`: finished, failed, interrupted, running (lost) or missing."""

    number: int
    overrides: list[str]
    state: str
    folder: str
    results: dict[str, Any]
    error: str | None


class SweepEnd(Callback):
    """Hydra's hooks around a sweep, in the process that was started; every launcher and sweeper has them."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        STARTED[folder] = finished(folder)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        tell(folder)
        ENDED.append(folder)


def tell(folder: Path) -> None:
    """Print the table of all jobs with a line for each that did not finish, and write it as sweep.json."""
    lines = jobs(folder)
    told = [
        f"job {line.number} {line.state}: {first_line(line.error or 'it left no word of how it ended')}"
        for line in lines
        if line.state != "finished"
    ]
    if not lines:
        told.append("no job has run: the overrides give no value to sweep over")
    elif finished(folder) == STARTED.get(folder) and all(line.state == "finished" for line in lines):
        told.append("nothing was left to run: every job had finished before")
    write_atomic(folder / SWEEP, json.dumps([line._asdict() for line in lines], indent=1) + "\n")
    console = Console()
    if lines:
        console.print(table(lines))
    for line in (*told, f"sweep folder: {folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def tell_stopped() -> None:
    """The table of a sweep that came to no end of its own (an interrupt, a lost worker), and how to go on."""
    for folder in STARTED.keys() - set(ENDED):
        if jobs(folder):
            tell(folder)
            print(f"stopped; to go on, give the same command and --resume {folder}", file=sys.stderr)


def finished(folder: Path) -> set[str]:
    """Names of the job folders whose job finished."""
    return {line.folder for line in jobs(folder) if line.state == "finished"}


def take_resume(arguments: Sequence[str]) -> list[str]:
    """The command line with `--resume <folder>` as Hydra's own override.

    Raises BadInput without -m, and for a folder that is no sweep's.
    """
    kept, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word != "--resume" and not word.startswith("--resume="):
            kept.append(word)
            continue
        folder = word.partition("=")[2] or (rest.pop(0) if rest else "")
        if not {"-m", "--multirun"} & {*arguments}:
            raise BadInput("--resume goes on with a sweep; give -m and the sweep's own overrides too")
        if not folder or not ((Path(folder) / "multirun.yaml").exists() or jobs(Path(folder))):
            raise BadInput(
                f"--resume needs the folder of a sweep, and {folder!r} is none; it lies under runs/"
            )
        quoted = folder.replace("'", "\\'")
        kept.append(f"hydra.sweep.dir='{quoted}'")
    return kept


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raises BadInput for `-m key=`: a sweep over no value, which Hydra takes for one empty text."""
    if {"-m", "--multirun"} & {*arguments}:
        for word in arguments[1:]:
            if found := re.fullmatch(r"([^=]+)=\s*", word):
                raise BadInput(
                    f"{word} gives no value to sweep over; write {found[1]}=a,b or, for an empty text, {found[1]}=''"
                )


def listen_for_term() -> None:
    """Lets SIGTERM end a job as an interrupt does, in a worker process too, which is started without `run_app`.

    A launcher that has its own word for the signal (SLURM sends it before it moves a job) keeps it.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


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


def mark(folder: Path, before: dict[str, Any], state: str, error: BaseException | str) -> None:
    """Write how a job broke off, also one whose run had closed already.

    A status that is still as it was `before` the job is another run's, which keeps its folder and its word.
    """
    status = read_status(folder)
    if status and (status == before or status["state"] in ("failed", "interrupted")):
        return
    write_status(folder, state, error)


def objectives(names: Sequence[str] | str, figures: dict[str, Any], wanted: int) -> Any:
    """What a sweeper that optimises `wanted` figures is told of a finished job: those of `names`.

    A lone figure is a number, several are a tuple. None, told in one line, counts as a failed trial.
    """
    names = [names] if isinstance(names, str) else list(names)
    values = [figures.get(name) for name in names]
    lacking = [name for name, value in zip(names, values) if value is None]
    if lacking:
        known = ", ".join(key for key, value in figures.items() if value is not None)
        told = f"it has no {', '.join(lacking)}; let objectives name figures it has ({known})"
    elif len(names) != wanted:
        told = f"objectives names {len(names)} figures, hydra.sweeper.direction {wanted}; name as many"
    else:
        return values[0] if wanted == 1 else tuple(values)
    print(f"the sweeper learns nothing from this job: {told}", file=sys.stderr)
    return None


def directions(sweeper: DictConfig) -> int:
    """How many figures the sweeper optimises; 0 for one that listens to none (Hydra's own grid)."""
    if sweeper._target_.endswith(".BasicSweeper"):
        return 0
    given = sweeper.get("direction")
    return len(given) if isinstance(given, ListConfig) else 1


def jobs(folder: Path) -> list[JobLine]:
    """Every job of a sweep, by number; of several tries of the same overrides the finished one, else the latest."""
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    tries: dict[str, Path] = {}
    for path in sorted((path for path in found if number_of(path) >= 0), key=rank):
        tries[path.name.partition("_")[2]] = path
    lines = []
    for path in sorted(tries.values(), key=number_of):
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


def rank(path: Path) -> tuple[bool, int, int]:
    """Which of several tries of a job counts: the highest."""
    status = path / "status.json"
    changed = status.stat().st_mtime_ns if status.exists() else 0
    return read_status(path).get("state") == "finished", changed, number_of(path)


def verdict(folders: Sequence[Path]) -> int:
    """Exit status of sweeps: 0, 2 if only bad input made jobs fail or there was none to run, 1 for anything else."""
    found = [jobs(folder) for folder in folders]
    bad = [line for lines in found for line in lines if line.state != "finished"]
    if not bad:
        return 0 if all(found) else 2
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
