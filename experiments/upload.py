"""Send finished run folders to W&B again, from their files alone: config, every record, figures, charts, rounds.

python -m experiments.upload runs/2026-11-30/12-00-00_benchmark_1a2b3c [more folders]

Runs are offline unless you are logged in, whatever the run itself was; what a sweep's jobs shared they share again.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from eagle4 import tracking
from eagle4.errors import BadInput
from eagle4.tracking import Job, TrackingSpec


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 2 if a folder could not be sent; the others are."""
    if not arguments or any(a.startswith("-") for a in arguments):
        print("error: name run folders: python -m experiments.upload runs/<day>/<run> …", file=sys.stderr)
        return 2
    status = 0
    for folder in map(Path, arguments):
        try:
            print(f"{folder}: {upload(folder)}")
        except BadInput as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    return status


def upload(folder: Path) -> str:
    """Send one folder; returns what was sent in a few words. Raises BadInput for a folder that holds no whole run."""
    config, job, records = contents(folder)
    given = config.get("tracking") or {}
    spec = TrackingSpec(
        "auto", given.get("project", "eagle4"), given.get("group"), tuple(given.get("tags") or ())
    )
    run = tracking.send(folder, config, spec, job)
    if run is None:
        raise BadInput(f"{folder}: W&B did not start; see the warning above, or set WANDB_MODE=offline")
    for record in records:
        if "summary" in record:
            run.summary(record["summary"])
        else:
            run.log({k: v for k, v in record.items() if k not in ("step", "time_s")}, record.get("step"))
    for picture in sorted(folder.glob("*.png")):
        run.attach(picture)
    run.charts()
    run.rounds()
    state = tracking.read_status(folder).get("state", "unknown")
    run.close(0 if state == "finished" else 1)
    return f"{len(records)} records, run {state}"


def contents(folder: Path) -> tuple[dict[str, Any], Job, list[dict[str, Any]]]:
    """Config, job and records. Raises BadInput naming the file that is missing or damaged."""
    for name in ("config.yaml", "environment.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise BadInput(f"{folder} is not a run folder: it has no {name}")
    config = parsed(folder / "config.yaml", lambda text: OmegaConf.to_container(OmegaConf.create(text)))
    job = parsed(folder / "environment.json", lambda text: Job(**json.loads(text)["job"]))
    records = lines(folder / "metrics.jsonl")
    if (folder / "rounds.jsonl").exists():
        lines(folder / "rounds.jsonl")  # tracking reads it again; here it is only to be whole
    for chart in folder.glob("*.chart.json"):
        parsed(chart, lambda text: [json.loads(text)[key] for key in ("x", "y", "rows")])
    if (folder / "status.json").exists():
        parsed(folder / "status.json", json.loads)
    return {str(k): v for k, v in config.items()}, job._replace(overrides=tuple(job.overrides)), records


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise BadInput(f"{path}: line {number} is damaged ({error}); remove it") from error
    return found


def parsed(path: Path, read: Callable[[str], Any]) -> Any:
    try:
        return read(path.read_text("utf-8"))
    except (ValueError, TypeError, KeyError, YAMLError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise BadInput(f"{path} is damaged ({said}); this run can't be sent") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
