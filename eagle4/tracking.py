"""Where a run's results go: a folder of plain files, which is the truth, and W&B beside it.

config.yaml is the resolved config, environment.json the commit, machine, versions, command and W&B id,
metrics.jsonl one record a line, flushed at once, status.json running, finished, failed (with the traceback)
or interrupted.
"""

import json
import logging
import netrc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlparse

from omegaconf import OmegaConf

from eagle4.errors import BadInput
from eagle4.files import plain, write_atomic
from eagle4.fingerprint import device_fingerprint, git_commit

_log = logging.getLogger("eagle4")
_PACKAGES = (
    "eagle4",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "hydra-core",
    "omegaconf",
    "wandb",
    "tokenizers",
)


@dataclass(frozen=True)
class TrackingSpec:
    """What W&B gets. `wandb`: auto (online if logged in, else offline), online, offline or disabled."""

    wandb: str = "auto"
    project: str = "eagle4"
    group: str | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        modes = ("auto", "online", "offline", "disabled")
        if self.wandb not in modes:
            raise BadInput(f"tracking.wandb {self.wandb!r} is not known; use one of {', '.join(modes)}")


class Job(NamedTuple):
    """Which job of an experiment this is: `kind` is its name, `group` what a sweep's jobs share."""

    kind: str
    name: str
    group: str | None = None
    overrides: tuple[str, ...] = ()


class Run:
    """An open run. Records go to metrics.jsonl first and to W&B second, which can never lose one."""

    def __init__(self, folder: Path, board: Any, file: TextIO) -> None:
        self.folder = folder
        self._board = board
        self._file = file
        self._start = time.monotonic()
        self._next_step = 0

    def log(self, record: dict[str, Any], step: int | None = None) -> None:
        """Appends a record. `step` counts up by itself unless given; W&B draws every curve over it."""
        step = self._next_step if step is None else step
        self._next_step = max(self._next_step, step + 1)
        values = plain(record)
        self._append({"step": step, "time_s": round(time.monotonic() - self._start, 3), **values})
        known = {key: value for key, value in values.items() if value is not None}
        self._tell("log", lambda board: board.log({**known, "step": step}))

    def summary(self, values: dict[str, Any]) -> None:
        """Final figures of the run: a line `{"summary": …}` and W&B's summary table."""
        values = plain(values)
        self._append({"summary": values})
        self._tell("summary", lambda board: board.summary.update(values))

    def attach(self, path: str | Path) -> None:
        """Shows a figure that lies in the folder in W&B too."""

        def show(board: Any) -> None:
            import wandb

            board.log({Path(path).stem: wandb.Image(str(path)), "step": self._next_step})

        self._tell("attach", show)

    def scatter(self, name: str, rows: Sequence[dict[str, Any]], x: str, y: str) -> None:
        """Keeps rows as `<name>.chart.json` and shows them in W&B: a table, and a chart of two of their columns."""
        chart = {"x": x, "y": y, "rows": plain(rows)}
        write_atomic(self.folder / f"{name}.chart.json", json.dumps(chart, indent=1) + "\n")
        self.charts()

    def charts(self) -> None:
        """Every chart.json of the folder in W&B."""

        def show(board: Any) -> None:
            import wandb

            for path in sorted(self.folder.glob("*.chart.json")):
                name, chart = path.name.removesuffix(".chart.json"), json.loads(path.read_text("utf-8"))
                columns: list[Any] = list(chart["rows"][0]) if chart["rows"] else [chart["x"], chart["y"]]
                data = [[row[c] for c in columns] for row in chart["rows"]]
                made = [wandb.Table(columns=columns, data=data) for _ in range(2)]  # one belongs to its chart
                drawn = wandb.plot.scatter(made[0], chart["x"], chart["y"], title=name)
                board.log({f"{name}_chart": drawn, f"{name}_table": made[1], "step": self._next_step})

        self._tell("chart", show)

    def rounds(self) -> None:
        """rounds.jsonl of the folder as a table in W&B."""

        def show(board: Any) -> None:
            import wandb

            path = self.folder / "rounds.jsonl"
            rows = (
                [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
            )
            if rows:
                columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
                data = [[row.get(c) for c in columns] for row in rows]
                board.log({"rounds": wandb.Table(columns=columns, data=data), "step": self._next_step})

        self._tell("rounds", show)

    def close(self, exit_code: int) -> None:
        """Ends the W&B run; without it the next job of a multirun would write into this one."""
        self._file.close()
        self._tell("finish", lambda board: board.finish(exit_code=exit_code))

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def _tell(self, what: str, action: Callable[[Any], None]) -> None:
        if self._board is None:
            return
        try:
            action(self._board)
        except Exception as error:
            _warn(what, error)


def send(folder: Path, config: dict[str, Any], tracking: TrackingSpec, job: Job) -> Run | None:
    """A run whose records go to W&B alone, for folders that are there already; None if W&B does not start."""
    board = _open_board(folder, config, tracking, job)
    return None if board is None else Run(folder, board, open(os.devnull, "w", encoding="utf-8"))


@contextmanager
def open_run(folder: str | Path, config: dict[str, Any], tracking: TrackingSpec, job: Job) -> Iterator[Run]:
    """Opens a run in `folder` and closes it whatever happens; an exception goes to status.json and on.

    `config` is a plain resolved dict (W&B refuses a DictConfig). Raises BadInput if the folder already holds
    a run.
    """
    folder = Path(folder)
    if (folder / "status.json").exists():
        raise BadInput(f"{folder} already holds a run; choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    write_status(folder, "running")
    board = None
    run = None
    state, exit_code, error = "finished", 0, None
    try:
        write_atomic(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
        board = _open_board(folder, config, tracking, job)
        write_atomic(
            folder / "environment.json", json.dumps(_environment(config, job, board), indent=1) + "\n"
        )
        run = Run(folder, board, (folder / "metrics.jsonl").open("a", encoding="utf-8"))
        yield run
    except KeyboardInterrupt:
        state, exit_code, error = "interrupted", 130, "KeyboardInterrupt"
        raise
    except BaseException as failure:
        state, exit_code, error = "failed", 1, failure
        raise
    finally:
        write_status(folder, state, error)
        if run is not None:
            run.close(exit_code)
        elif board is not None:
            board.finish(exit_code=exit_code)


def write_status(folder: str | Path, state: str, error: BaseException | str | None = None) -> None:
    """Writes status.json: state, times, and for a failure its one-line message and traceback."""
    path = Path(folder) / "status.json"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    started = read_status(folder).get("started", now)
    status: dict[str, Any] = {
        "state": state,
        "started": started,
        "ended": None if state == "running" else now,
    }
    if isinstance(error, BaseException):
        status["error"] = f"{type(error).__name__}: {error}"
        status["traceback"] = "".join(traceback.format_exception(error))
    elif error is not None:
        status["error"] = error
    write_atomic(path, json.dumps(status, indent=1, ensure_ascii=False) + "\n")


def read_status(folder: str | Path) -> dict[str, Any]:
    """What status.json says; empty if the folder holds no run."""
    path = Path(folder) / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def count_records(folder: str | Path) -> int:
    """How many records metrics.jsonl holds, final summaries apart."""
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sum(not line.startswith('{"summary"') for line in lines)


def _environment(config: dict[str, Any], job: Job, board: Any) -> dict[str, Any]:
    model = config.get("model")
    dtype = model.get("dtype", "float32") if isinstance(model, dict) else "float32"
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "job": plain(job._asdict()),
        "git": git_commit(Path(__file__).parent),
        "device": device_fingerprint(dtype),
        "versions": versions,
        "wandb": _identity(board),
    }


def _identity(board: Any) -> dict[str, Any] | None:
    if board is None:
        return None
    mode = board.settings.mode
    # Asked for the address of an offline run, W&B prints a warning.
    return {"id": board.id, "mode": mode, "url": board.url if mode == "online" else None}


def _open_board(folder: Path, config: dict[str, Any], tracking: TrackingSpec, job: Job) -> Any:
    if tracking.wandb == "disabled":
        return None
    mode = wandb_mode(tracking.wandb)
    try:
        import wandb

        board = wandb.init(
            project=tracking.project,
            group=tracking.group or job.group,
            job_type=job.kind,
            name=job.name,
            tags=list(tracking.tags),
            config=config,
            dir=str(folder),
            mode=mode,
            reinit="finish_previous",
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )
        board.define_metric("step", hidden=True)
        board.define_metric("*", step_metric="step")
    except Exception as error:
        _warn("start", error)
        return None
    return board


def wandb_mode(wanted: str) -> Any:
    """The W&B mode for `tracking.wandb`: auto is online for a user who is logged in, or as WANDB_MODE says.

    Raises BadInput for online without a login, where W&B would stop and ask for a key.
    """
    logged_in = _logged_in()
    if wanted == "online" and not logged_in:
        raise BadInput(
            "tracking.wandb=online needs a login: run `wandb login`, or use tracking.wandb=offline"
        )
    if wanted != "auto":
        return wanted
    forced = os.environ.get("WANDB_MODE")
    return forced if forced in ("online", "offline", "disabled") else "online" if logged_in else "offline"


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _warn(what: str, error: Exception) -> None:
    first = (str(error).splitlines() or [""])[0]
    _log.warning("W&B %s failed (%s: %s); results go on in metrics.jsonl", what, type(error).__name__, first)
