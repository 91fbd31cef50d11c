"""W&B rebuilt from a run folder's files: the same records, the same summary, and one line for a folder that is none."""

import json
from types import SimpleNamespace

import pytest

from eagle4 import tracking
from eagle4.tracking import Job, TrackingSpec, open_run
from experiments import upload

CONFIG = {"model": {"source": "m"}, "tracking": {"_target_": "t", "wandb": "disabled", "tags": ["a"]}}


@pytest.fixture
def folder(tmp_path):
    """A run that never went to W&B."""
    where = tmp_path / "run"
    job = Job("benchmark", "3_x", "sweep_1", ("x=1",))
    with open_run(where, CONFIG, TrackingSpec("disabled"), job) as run:
        run.log({"decode/tau": 2.0, "method": "eagle4"})
        run.log({"decode/tau": 3.0, "method": "eagle4"}, step=7)
        run.summary({"speedup": 1.5})
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
    assert (spec.wandb, spec.tags) == ("auto", ("a",))
    assert job == Job("benchmark", "3_x", "sweep_1", ("x=1",))
    points = [(r["step"], r["decode/tau"]) for r in board.logged if "decode/tau" in r]
    assert points == [(0, 2.0), (7, 3.0)]
    assert board.summary == {"speedup": 1.5}
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


def test_a_job_that_raises_finishes_its_run(tmp_path, boards):
    with (
        pytest.raises(ValueError, match="planted"),
        open_run(tmp_path / "r", {}, TrackingSpec(), Job("k", "n")),
    ):
        raise ValueError("planted")
    assert boards[0][0].ended == 1
