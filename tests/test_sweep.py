"""Sweeps: every job told, failures included, whichever launcher ran it; and what is missing goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from eagle4 import conf, sweeps, tracking
from eagle4.errors import BadInput

# A job that costs nothing. While the file `fixed` is not there it fails for batch 3, for 4 after its run has closed,
# stops for 5 before it opens, is killed for 6, ended by a cluster's signal for 10, and waits for 99.
SCRIPT = """
import os, pathlib, signal, time
from eagle4 import conf, tracking
from eagle4.errors import BadInput

def main(config):
    folder, job = conf.output()
    broken = not pathlib.Path("fixed").exists()
    if config.batch == 5 and broken:
        raise KeyboardInterrupt
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        with pathlib.Path(folder, "tries").open("a") as file:
            file.write("x")
        if config.batch == 3 and broken:
            raise ValueError("planted")
        if config.batch == 6 and broken:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.batch == 10 and broken:
            os.kill(os.getpid(), signal.SIGTERM)
        if config.batch == 99 and broken:
            time.sleep(60)
        run.log({"replay/batch": config.batch})
    if config.batch == 4 and broken:
        raise ValueError("too late")
    return {"tau": config.tree.depth / 2, "ms_per_token": float(config.batch)}

if __name__ == "__main__":
    conf.run_app(main, "replay")
"""
DIR = "hydra.sweep.dir=sweep"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the script in a folder of its own."""
    (tmp_path / "job.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONWARNINGS", "error")

    def started(*arguments):
        command = [sys.executable, "job.py", "-m", "tracking.wandb=disabled", *arguments]
        env = os.environ | {"WANDB_MODE": "disabled", "JAX_PLATFORMS": "cpu"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=env, **streams)

    return started


@pytest.fixture
def sweep(start, tmp_path):
    """Runs the script to its end: (exit status, stdout, stderr, sweep.json)."""

    def run(*arguments):
        process = start(*arguments)
        out, err = process.communicate(timeout=120)
        path = tmp_path / "sweep" / "sweep.json"
        return process.returncode, out, err, json.loads(path.read_text()) if path.exists() else None

    return run


def test_twelve_jobs_two_of_which_fail_and_then_go_on(sweep, tmp_path):
    grid = "batch=1,2,3,7,8,9", "tree.depth=1,2", DIR
    code, out, err, jobs = sweep(*grid)
    assert code == 1
    assert [job["state"] for job in jobs].count("failed") == 2
    assert [job["number"] for job in jobs] == list(range(12))
    assert err.count("planted") > 1
    assert out.count("failed: ValueError: planted") == 2
    for job in jobs:
        given = dict(o.split("=") for o in job["overrides"])
        if job["state"] == "finished":
            assert job["results"] == {
                "tau": int(given["tree.depth"]) / 2,
                "ms_per_token": float(given["batch"]),
            }
        else:
            assert (given["batch"], job["error"]) == ("3", "ValueError: planted")
            assert (
                "planted"
                in json.loads((tmp_path / "sweep" / job["folder"] / "status.json").read_text())["traceback"]
            )
    (tmp_path / "fixed").touch()
    code, _, _, again = sweep(*grid[:2], "--resume", "sweep")
    assert code == 0
    assert [job["state"] for job in again] == ["finished"] * 12
    # A job that was finished has not run again, and the others left nothing of their first try.
    assert {p.read_text() for p in tmp_path.glob("sweep/*/tries")} == {"x"}


def test_resuming_goes_by_overrides_not_by_number(sweep, tmp_path):
    sweep("batch=1,2", DIR)
    code, _, _, jobs = sweep("batch=8,2,1", "--resume=sweep")
    assert code == 0
    assert sorted(job["results"]["ms_per_token"] for job in jobs) == [1, 2, 8]
    assert len(list(tmp_path.glob("sweep/*/tries"))) == 3
    assert {p.read_text() for p in tmp_path.glob("sweep/*/tries")} == {"x"}


def test_a_failed_job_that_comes_back_under_another_number_is_one_line(sweep, tmp_path):
    code, _, _, jobs = sweep("batch=3,1", DIR)
    assert (code, [job["state"] for job in jobs]) == (1, ["failed", "finished"])
    (tmp_path / "fixed").touch()
    code, out, _, jobs = sweep("batch=1,3", "--resume", "sweep")
    assert code == 0
    assert sorted((job["results"]["ms_per_token"], job["state"]) for job in jobs) == [
        (1, "finished"),
        (3, "finished"),
    ]
    assert "nothing was left to run" not in out
    code, out, _, again = sweep("batch=1,3", "--resume", "sweep")
    assert (code, again) == (0, jobs)
    assert out.count("nothing was left to run: every job had finished before") == 1


def test_a_job_that_breaks_after_its_run_closed_has_failed(sweep, tmp_path):
    code, _, _, jobs = sweep("batch=4,1", DIR)
    assert (code, [job["error"] for job in jobs]) == (1, ["ValueError: too late", None])
    (tmp_path / "fixed").touch()
    code, _, _, jobs = sweep("batch=4,1", "--resume", "sweep")
    assert (code, jobs[0]["results"]["ms_per_token"]) == (0, 4)


@pytest.mark.slow
def test_an_interrupt_before_the_run_opens_is_told_with_the_way_on(sweep):
    code, out, err, jobs = sweep("batch=1,5", DIR)
    assert (code, [job["state"] for job in jobs]) == (130, ["finished", "interrupted"])
    assert "interrupted" in out
    assert "give the same command and --resume sweep" in err


@pytest.mark.slow
def test_a_lost_worker_still_leaves_the_table(sweep, tmp_path):
    code, out, err, jobs = sweep("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "batch=1,6", DIR)
    assert code == 1
    assert jobs[-1]["state"] == "running", "nobody could write how it ended"
    assert "sweep folder: sweep" in out
    assert "job 1 running: it left no word of how it ended" in out
    assert [line for line in err.splitlines() if line.startswith("error: the sweep stopped: Terminated")]
    (tmp_path / "fixed").touch()
    code, _, _, jobs = sweep("batch=1,6", "--resume=sweep")
    assert (code, [job["state"] for job in jobs]) == (0, ["finished"] * 2)


@pytest.mark.slow
def test_a_signal_to_a_worker_interrupts_its_job(sweep, tmp_path):
    code, _, err, jobs = sweep("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "batch=1,10", DIR)
    assert code == 130
    assert (jobs[-1]["overrides"][-1], jobs[-1]["state"]) == ("batch=10", "interrupted"), err
    (tmp_path / "fixed").touch()
    code, _, _, jobs = sweep("batch=1,10", "--resume=sweep")
    assert (code, [job["state"] for job in jobs]) == (0, ["finished"] * 2)


def test_a_sweep_over_nothing_says_so(sweep):
    code, out, err, jobs = sweep("batch=", DIR)
    assert (code, out, jobs) == (2, "", None)
    assert (
        err == "error: batch= gives no value to sweep over; write batch=a,b or, for an empty text, batch=''\n"
    )
    code, out, _, jobs = sweep("batch=range(3,3)", DIR)
    assert (code, jobs) == (2, [])
    assert out.splitlines() == [
        "no job has run: the overrides give no value to sweep over",
        "sweep folder: sweep",
    ]


def test_a_killed_sweep_keeps_what_is_done_and_goes_on(start, sweep, tmp_path):
    process = start("batch=1,99,2", DIR)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("sweep/*/tries"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    states = [json.loads(p.read_text())["state"] for p in sorted(tmp_path.glob("sweep/*/status.json"))]
    assert states == ["finished", "interrupted"]
    (tmp_path / "fixed").touch()
    code, _, _, jobs = sweep("batch=1,99,2", "--resume", "sweep")
    assert (code, [job["state"] for job in jobs]) == (0, ["finished"] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_in_other_processes_are_judged_by_what_they_left(sweep, launcher):
    more = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else ["hydra.launcher.timeout_min=2"]
    code, out, _, jobs = sweep(f"hydra/launcher={launcher}", *more, "batch=1,3", DIR)
    assert code == 1
    assert [job["state"] for job in jobs] == ["finished", "failed"]
    assert jobs[0]["results"]["ms_per_token"] == 1
    assert "failed: ValueError: planted" in out


@pytest.mark.slow
def test_optuna_gets_two_objectives_and_survives_a_failed_job(sweep, tmp_path, monkeypatch):
    # The Optuna that the sweeper asks for uses a name that SQLAlchemy has moved.
    monkeypatch.setenv("PYTHONWARNINGS", "error,ignore::DeprecationWarning:optuna.storages._rdb.models")
    space = "batch=choice(1,3)", "tree.depth=choice(1,2)"
    code, _, err, jobs = sweep("hydra/sweeper=tau_against_cost", "hydra.sweeper.n_trials=4", *space, DIR)
    # A trial that repeats another's overrides adds no line.
    assert 2 <= len({tuple(job["overrides"]) for job in jobs}) == len(jobs), err
    failed = [job for job in jobs if job["state"] == "failed"]
    assert code == (1 if failed else 0)
    front = OmegaConf.load(tmp_path / "sweep" / "optimization_results.yaml").solutions
    told = {(s.params.batch, s.params["tree.depth"]): list(s["values"]) for s in front}
    assert told, "a study whose every trial failed has an empty front"
    assert all(values == [depth / 2, batch] for (batch, depth), values in told.items())
    assert {batch for batch, _ in told} == {1}, "batch 3 fails"


@pytest.mark.parametrize("path", sorted(conf.CONFIGS.glob("hydra/*/*.yaml")), ids=lambda p: p.stem)
def test_every_launcher_and_sweeper_composes(path):
    conf.compose("replay", [f"hydra/{path.parent.name}={path.stem}"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prog", "-m", "--resume"], "--resume needs the folder of a sweep"),
        (["prog", "-m", "--resume", "nowhere"], "'nowhere' is none"),
        (["prog", "-m", "--resume", "."], "'.' is none"),
        (["prog", "--resume", "."], "give -m and the sweep's own overrides too"),
    ],
)
def test_resuming_nothing_costs_one_line(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=said):
        sweeps.take_resume(arguments)


def test_bad_input_alone_gives_its_own_status(tmp_path):
    for number, error in enumerate(["BadInput: no", None, "BadInput: neither"]):
        folder = tmp_path / f"{number}_x={number}"
        folder.mkdir()
        state = {"state": "failed", "error": error} if error else {"state": "finished"}
        (folder / "status.json").write_text(json.dumps(state))
    assert sweeps.verdict([tmp_path]) == 2
    (tmp_path / "3_lost").mkdir()
    assert sweeps.verdict([tmp_path]) == 1
    assert [line.state for line in sweeps.jobs(tmp_path)] == ["failed", "finished", "failed", "missing"]


def test_a_folder_with_a_comma_is_one_folder(tmp_path):
    folder = tmp_path / "a=b, c's"
    (folder / "0_x=1").mkdir(parents=True)
    (folder / "0_x=1" / "status.json").write_text('{"state": "finished"}')
    *_, override = sweeps.take_resume(["prog", "-m", "--resume", str(folder)])
    parsed = OverridesParser.create().parse_override(override)
    assert (parsed.key_or_group, parsed.value()) == ("hydra.sweep.dir", str(folder))
    assert not parsed.is_sweep_override()


def test_a_broken_job_marks_its_own_run_alone(tmp_path):
    tracking.write_status(tmp_path, "finished")
    before = tracking.read_status(tmp_path)
    sweeps.mark(tmp_path, before, "failed", ValueError("no"))
    assert tracking.read_status(tmp_path) == before, "the folder was another run's"
    sweeps.mark(tmp_path, {}, "failed", ValueError("no"))
    assert tracking.read_status(tmp_path)["error"] == "ValueError: no"
    sweeps.mark(tmp_path, {}, "failed", ValueError("later"))
    assert tracking.read_status(tmp_path)["error"] == "ValueError: no", "the run has said it already"


def test_objectives_are_the_named_figures(capsys):
    figures = {"tau": 2.0, "speedup": 1.5, "loss": None}
    assert sweeps.objectives(["speedup", "tau"], figures, 2) == (1.5, 2.0)
    assert sweeps.objectives(["tau"], figures, 1) == sweeps.objectives("tau", figures, 1) == 2.0
    assert capsys.readouterr().err == ""
    for names in (["cost"], ["tau", "loss"]):
        assert sweeps.objectives(names, figures, len(names)) is None
        (line,) = capsys.readouterr().err.splitlines()
        assert "name figures it has (tau, speedup)" in line
    for names, wanted in (([], 1), (["tau"], 2), (["tau", "speedup"], 1)):
        assert sweeps.objectives(names, figures, wanted) is None
        (line,) = capsys.readouterr().err.splitlines()
        assert f"names {len(names)} figures, hydra.sweeper.direction {wanted}" in line
    assert Path(sweeps.glob_safe("a[1]*")).name == "a[[]1[]][*]"
