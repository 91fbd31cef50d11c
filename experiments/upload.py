"""Send finished run folders to W&B again, from their files alone: config, every record, figures, rounds.

python -m experiments.upload runs/2026-11-30/12-00-00_benchmark_1a2b3c [more folders]

Runs are offline unless you are logged in; what a sweep's jobs shared they share again.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

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
    config, environment, records = contents(folder)
    given = wanted(config)
    known = {"wandb": "auto", "project": "eagle4", "group": None} | given
    spec = TrackingSpec(known["wandb"], known["project"], known["group"], tuple(given.get("tags", ())))
    job = Job(**environment["job"] | {"overrides": tuple(environment["job"]["overrides"])})
    run = tracking.send(folder, config, spec, job)
    if run is None:
        raise BadInput(f"{folder}: W&B did not start; see the warning above, or set WANDB_MODE=offline")
    for record in records:
        if "summary" in record:
            run.summary(record["summary"])
        else:
            run.log({k: v for k, v in record.items() if k not in ("step", "time_s")}, record["step"])
    for picture in sorted(folder.glob("*.png")):
        run.attach(picture)
    run.rounds()
    state = tracking.read_status(folder).get("state", "unknown")
    run.close(0 if state == "finished" else 1)
    return f"{len(records)} records, run {state}"


def wanted(config: dict[str, Any]) -> dict[str, Any]:
    """The run's own tracking settings; a disabled one is sent as if it had said auto."""
    given = {k: v for k, v in config.get("tracking", {}).items() if k != "_target_"}
    return given | ({"wandb": "auto"} if given.get("wandb") == "disabled" else {})


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Config, environment and records. Raises BadInput naming the file that is missing or damaged."""
    for name in ("config.yaml", "environment.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise BadInput(f"{folder} is not a run folder: it has no {name}")
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(config, dict)
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise BadInput(
                f"{folder / 'metrics.jsonl'}: line {number} is damaged ({error}); remove it"
            ) from error
    environment = json.loads((folder / "environment.json").read_text("utf-8"))
    return {str(k): v for k, v in config.items()}, environment, records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
