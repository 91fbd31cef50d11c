"""A run's folder tells the truth however the run ends, and W&B never mixes or loses anything."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from omegaconf import OmegaConf

from eagle4 import tracking
from eagle4.errors import BadInput
from eagle4.fingerprint import device_fingerprint, git_commit
from eagle4.tracking import Job, TrackingSpec

DISABLED = TrackingSpec(wandb="disabled")
JOB = Job("benchmark", "first")


def read(folder, name):
    return json.loads((folder / name).read_text())


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_leaves_config_environment_records_and_status(tmp_path):
    config = {"tree": {"depth": 3, "paths": [[0], [0, 1]]}, "model": {"dtype": "bfloat16"}}
    with tracking.open_run(tmp_path / "run", config, DISABLED, JOB) as run:
        assert read(run.folder, "status.json")["state"] == "running"
        run.log({"tau": np.float32(2.5), "joint": np.array([0.5, np.nan])})
        assert records(run.folder)[0]["tau"] == 2.5, "a record is on disk as soon as it is logged"
        run.log({"tau": float("inf")}, step=7)
        run.log({"tau": 1})
        run.summary({"speedup_vs_ar": 1.5})
    assert OmegaConf.to_container(OmegaConf.load(run.folder / "config.yaml")) == config
    first, second, third, last = records(run.folder)
    assert (first["step"], second["step"], third["step"]) == (0, 7, 8)
    assert first["joint"] == [0.5, None]
    assert second["tau"] is None
    assert last == {"summary": {"speedup_vs_ar": 1.5}}
    assert tracking.count_records(run.folder) == 3
    environment = read(run.folder, "environment.json")
    assert environment["device"]["dtype"] == "bfloat16"
    assert environment["device"]["platform"] == "cpu"
    assert environment["versions"]["jax"] == environment["device"]["jax"]
    assert environment["command"] == sys.argv
    assert environment["job"]["name"] == "first"
    assert environment["wandb"] is None
    status = read(run.folder, "status.json")
    assert status["state"] == "finished"
    assert status["ended"] >= status["started"]
    assert "traceback" not in status


def run_that_raises(folder, error):
    with tracking.open_run(folder, {}, DISABLED, JOB) as run:
        run.log({"tau": 1.0})
        raise error


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError("no luck"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_broken_run_keeps_its_records_and_says_why(tmp_path, error, state):
    with pytest.raises(type(error)):
        run_that_raises(tmp_path, error)
    status = read(tmp_path, "status.json")
    assert status["state"] == state
    assert len(records(tmp_path)) == 1
    if state == "failed":
        assert status["error"] == "ValueError: no luck"
        assert "run_that_raises" in status["traceback"]


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path):
    with tracking.open_run(tmp_path, {"a": 1}, DISABLED, JOB) as run:
        run.log({"x": 1})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(BadInput, match="already holds a run"), tracking.open_run(tmp_path, {}, DISABLED, JOB):
        pass
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def clean_environment(tmp_path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "JAX_PLATFORMS": "cpu"}


THREE_JOBS = """
import sys
from pathlib import Path
from eagle4.tracking import Job, TrackingSpec, open_run
for x in (1, 2, 3):
    try:
        job = Job("test", f"job{x}", "s")
        with open_run(Path(sys.argv[1], str(x)), {"x": x}, TrackingSpec(), job) as run:
            run.log({"tau": x / 2})
            run.log({"tau": None, "depth": 4}, step=5)
            run.summary({"best": x})
            if x == 2:
                raise ValueError("job 2 broke")
    except ValueError:
        pass
"""

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
for x in (1, 2, 3):
    (path,) = Path(sys.argv[1], str(x)).glob("wandb/offline-run-*/run-*.wandb")
    found = {"history": [], "config": {}}
    for record in map(Record.FromString, payloads(path.read_bytes())):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found["config"] |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            found |= {"id": record.run.run_id, "group": record.run.run_group}
            found |= {"kind": record.run.job_type, "name": record.run.display_name}
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
        elif kind == "history":
            row = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            found["history"].append({k: v for k, v in row.items() if not k.startswith("_")})
    stored.append(found)
print(json.dumps(stored))
"""


def python(code, folder):
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        env=clean_environment(folder),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "W&B must stay quiet"
    return done.stdout


def test_three_offline_runs_in_one_process_are_three_wandb_runs(tmp_path):
    """Also when the second raises. What W&B stored is read back from its own transaction logs."""
    assert python(THREE_JOBS, tmp_path) == ""
    stored = json.loads(python(READ_BACK, tmp_path))
    assert len({s["id"] for s in stored}) == 3
    assert [s["config"]["x"] for s in stored] == [1, 2, 3]
    assert [s["exit_code"] for s in stored] == [0, 1, 0]
    assert [s["name"] for s in stored] == ["job1", "job2", "job3"]
    assert {(s["group"], s["kind"]) for s in stored} == {("s", "test")}
    assert stored[0]["history"] == [{"tau": 0.5, "step": 0}, {"depth": 4, "step": 5}]
    folders = [tmp_path / str(x) for x in (1, 2, 3)]
    assert [read(f, "environment.json")["wandb"]["id"] for f in folders] == [s["id"] for s in stored]
    assert [read(f, "environment.json")["wandb"]["mode"] for f in folders] == ["offline"] * 3
    assert [read(f, "status.json")["state"] for f in folders] == ["finished", "failed", "finished"]


class BrokenBoard:
    def __getattr__(self, name):
        raise ConnectionError("no network\nand more lines")


def test_wandb_trouble_loses_nothing_and_warns_in_one_line(tmp_path, caplog):
    file = (tmp_path / "metrics.jsonl").open("a")
    run = tracking.Run(tmp_path, BrokenBoard(), file)
    run.log({"tau": 1.0})
    run.summary({"best": 1})
    run.close(0)
    assert records(tmp_path)[0]["tau"] == 1.0
    assert records(tmp_path)[1] == {"summary": {"best": 1}}
    assert len(caplog.records) == 3
    assert all("no network" in r.message and "\n" not in r.message for r in caplog.records)


def test_a_wandb_that_cannot_start_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", BrokenBoard())
    with tracking.open_run(tmp_path, {}, TrackingSpec(wandb="offline"), JOB) as run:
        run.log({"tau": 1.0})
    assert read(tmp_path, "status.json")["state"] == "finished"
    assert tracking.count_records(tmp_path) == 1
    assert "W&B start failed" in caplog.text


def test_mode_follows_the_login(tmp_path, monkeypatch):
    for name in [k for k in os.environ if k.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert tracking.wandb_mode("auto") == "offline"
    with pytest.raises(BadInput, match="wandb login"):
        tracking.wandb_mode("online")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert tracking.wandb_mode("auto") == "online"
    assert tracking.wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert tracking.wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert tracking.wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracking.wandb_mode("auto") == "offline"
    with pytest.raises(BadInput, match="auto, online, offline, disabled"):
        TrackingSpec(wandb="of")


def test_fingerprint_is_complete_and_json():
    fingerprint = device_fingerprint()
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert fingerprint["dtype"] == "float32"
    assert all(value not in (None, "", 0) for value in fingerprint.values())
    assert fingerprint["cores"] >= 1


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_git_commit_knows_clean_dirty_ignored_and_outside(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("env/\n")
    (tmp_path / "env").mkdir()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "--no-verify", "-m", "x")
    assert git_commit(tmp_path) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert git_commit(tmp_path / "env") is None
    (tmp_path / "new_method.py").write_text("")
    assert git_commit(tmp_path)["dirty"]
    monkeypatch.setenv("PATH", "")
    assert git_commit(tmp_path) is None
