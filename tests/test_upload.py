"""W&B rebuilt from a run folder's files: the same records, the same summary, and one line for a folder that is none."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from eagle4 import tracking
from eagle4.tracking import Job, TrackingSpec, open_run
from experiments import upload

CONFIG = {"model": {"source": "m"}, "tracking": {"_target_": "t", "wandb": "offline", "tags": ["a"]}}


@pytest.fixture
def folder(tmp_path):
    """A run that never went to W&B."""
    where = tmp_path / "run"
    job = Job("benchmark", "3_x", "sweep_1", ("x=1",))
    with open_run(where, CONFIG, TrackingSpec("disabled"), job) as run:
        run.log({"decode/tau": 2.0, "method": "eagle4"})
        run.log({"decode/tau": 3.0, "method": "eagle4"}, step=7)
        run.summary({"speedup": 1.5})
        run.scatter("worth", [{"method": "ar", "tau": 1.0, "ms_per_token": 30.0}], "ms_per_token", "tau")
    (where / "rounds.jsonl").write_text('{"round": 0, "num_accepted": 2}\n')
    return where


class Board:
    """Stands for a W&B run and remembers what it was told."""

    id, settings = "board", SimpleNamespace(mode="offline")

    def __init__(self):
        self.logged, self.summary, self.ended = [], {}, None

    def log(self, record):
        self.logged.append(record)

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def boards(monkeypatch):
    made = []

    def opened(folder, config, spec, job):
        made.append((Board(), config, spec, job))
        return made[-1][0]

    monkeypatch.setattr(tracking, "_open_board", opened)
    return made


def test_everything_of_a_folder_is_sent_again(folder, boards, capsys):
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    assert upload.main([str(folder)]) == 0
    ((board, config, spec, job),) = boards
    assert config == CONFIG
    assert (spec.wandb, spec.tags) == ("auto", ("a",)), (
        "online for who is logged in, though the run was offline"
    )
    assert job == Job("benchmark", "3_x", "sweep_1", ("x=1",))
    points = [(r["step"], r["decode/tau"]) for r in board.logged if "decode/tau" in r]
    assert points == [(0, 2.0), (7, 3.0)]
    assert board.summary == {"speedup": 1.5}
    assert [r["worth_table"].data for r in board.logged if "worth_table" in r] == [[["ar", 1, 30]]]
    assert [r["rounds"].data for r in board.logged if "rounds" in r] == [[[0, 2]]]
    assert board.ended == 0
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert "3 records, run finished" in capsys.readouterr().out


def test_a_failed_run_ends_as_failed(folder, boards):
    (folder / "status.json").write_text(json.dumps({"state": "failed"}))
    upload.main([str(folder)])
    assert boards[0][0].ended == 1


def test_bad_folders_are_told_and_the_others_sent(folder, boards, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.yaml", "environment.json"):
        (broken / name).write_bytes((folder / name).read_bytes())
    (broken / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    assert upload.main([str(tmp_path / "none"), str(broken), str(folder)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "none is not a run folder: it has no config.yaml" in told[0]
    assert "metrics.jsonl: line 2 is damaged" in told[1]
    assert boards[-1][0].ended == 0
    assert upload.main([]) == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "a: [1", "config.yaml is damaged"),
        ("environment.json", '{"job"', "environment.json is damaged"),
        ("environment.json", '{"job": {"knid": "x"}}', "environment.json is damaged"),
        ("metrics.jsonl", "7\n", "metrics.jsonl: line 1 is damaged"),
        ("rounds.jsonl", '{"round": 0}\n{"rou\n', "rounds.jsonl: line 2 is damaged"),
        ("worth.chart.json", '{"x": "tau"}', "worth.chart.json is damaged"),
        ("status.json", "{", "status.json is damaged"),
    ],
)
def test_a_damaged_file_costs_one_line_and_sends_nothing(folder, boards, capsys, name, content, said):
    (folder / name).write_text(content)
    assert upload.main([str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert boards == []


def test_a_job_that_raises_finishes_its_run(tmp_path, boards):
    with (
        pytest.raises(ValueError, match="planted"),
        open_run(tmp_path / "r", {}, TrackingSpec(), Job("k", "n")),
    ):
        raise ValueError("planted")
    assert boards[0][0].ended == 1


# What W&B stored in a folder, from its own transaction logs, the oldest first.
READ_BACK = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def payloads(data):
    # A LevelDB log after a file header of 7 bytes: blocks of 32 KiB, records of (crc, length, kind, bytes).
    place, whole = 7, b""
    while place < len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""

stored = []
paths = Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")
for path in sorted(paths, key=lambda p: p.stat().st_mtime_ns):
    found = {"history": [], "config": {}, "summary": {}}
    for record in map(Record.FromString, payloads(path.read_bytes())):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["config"] |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            found |= {"group": record.run.run_group, "kind": record.run.job_type}
            found |= {"name": record.run.display_name, "tags": list(record.run.tags)}
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
        elif kind == "summary":
            found["summary"] |= {i.key or ".".join(i.nested_key): i.value_json for i in record.summary.update}
        elif kind == "history":
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            found["history"].append({k: v for k, v in row.items() if not k.startswith("_")})
    stored.append(found)
print(json.dumps(stored))
"""

ROUND_TRIP = """
import sys
from pathlib import Path
from eagle4.tracking import Job, TrackingSpec, open_run
from experiments import upload

folder = Path(sys.argv[1])
config = {"model": {"source": "m"}, "tracking": {"wandb": "offline", "tags": ["a", "b"]}}
job = Job("benchmark", "3_x", "sweep_1", ("x=1",))
try:
    with open_run(folder, config, TrackingSpec("offline", tags=("a", "b")), job) as run:
        (folder / "rounds.jsonl").write_text('{"round": 0, "num_accepted": 2}\\n')
        run.log({"decode/tau": 2.5, "method": "eagle4"})
        run.log({"decode/tau": None, "decode/tokens": 4}, step=5)
        run.summary({"eagle4/speedup": 1.5})
        run.scatter("worth", [{"method": "ar", "tau": 1.0, "ms_per_token": 30.0}], "ms_per_token", "tau")
        run.rounds()
        raise ValueError("planted")
except ValueError:
    pass
sys.exit(upload.main([str(folder)]))
"""


def test_an_uploaded_run_holds_what_the_run_itself_told_wandb(tmp_path):
    """W&B itself, offline, for a job that raised: both runs are read back and are the same."""
    where = tmp_path / "run"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env = kept | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "JAX_PLATFORMS": "cpu"}
    outputs = []
    for code in (ROUND_TRIP, READ_BACK):
        command = [sys.executable, "-c", code, str(where)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        outputs.append(done.stdout)
    assert outputs[0] == f"{where}: 3 records, run failed\n"
    live, rebuilt = json.loads(outputs[1])
    assert rebuilt["config"]["model"] == {"source": "m"}
    assert (rebuilt["group"], rebuilt["kind"], rebuilt["name"]) == ("sweep_1", "benchmark", "3_x")
    assert (rebuilt["tags"], rebuilt["exit_code"]) == (["a", "b"], 1)
    assert {"decode/tau": 2.5, "method": "eagle4", "step": 0} in rebuilt["history"]
    assert {"decode/tokens": 4, "step": 5} in rebuilt["history"]
    assert rebuilt["summary"]["eagle4/speedup"] == "1.5"
    for name, columns in ("rounds", 2), ("worth_table", 3), ("worth_chart_table", 3):
        found = [row for row in rebuilt["history"] if f"{name}.nrows" in row]
        assert [(row[f"{name}.nrows"], row[f"{name}.ncols"]) for row in found] == [(1, columns)]
    for found in (live, rebuilt):
        found["config"].pop("_wandb", None)
        found["history"] = [row for row in found["history"] if not any(k.endswith(".nrows") for k in row)]
    assert {k: v for k, v in live.items() if k != "summary"} == {
        k: v for k, v in rebuilt.items() if k != "summary"
    }
