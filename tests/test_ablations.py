"""Record and replay as apps on a tiny model, and every experiment file in a fast form."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_model import write_model

from eagle4 import conf
from eagle4.checkpoint import Trained, save_drafter, save_factors
from eagle4.drafters import eagle_net
from eagle4.nn.abstract import initialise
from eagle4.recording import read
from eagle4.retrieval.factors import truncated
from eagle4.specs import EagleSpec
from eagle4.target.load import load
from experiments import benchmark, draft_cost, record, replay
from experiments import load as load_app

PROMPTS = [
    {"id": "one", "suite": "s", "category": "talk", "turns": ["abc def"]},
    {"id": "two", "suite": "s", "category": "sums", "turns": ["what is 123?"]},
    {"id": "three", "suite": "s", "category": "sums", "turns": ["123 123"]},
]
SHAPES = "shapes=[[1,1],[2,3]]"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a model, a drafter that scores a list of ids, factors of rank 4, and prompts."""
    where = tmp_path_factory.mktemp("home")
    model = load(write_model(where / "model"))
    spec = EagleSpec(fc_norm=True, norm_output=True, draft_vocab=40, target_rows=True)
    spec = eagle_net.complete(spec, model.spec)
    weights = initialise(eagle_net.abstract(spec, model.spec), jax.random.key(0))
    weights["draft_ids"] = np.arange(40, dtype=np.int32)
    save_drafter(where / "drafter", Trained(spec, weights), model.spec, model.params, "")
    whole = {name: value for name, value in weights.items() if name != "draft_ids"}
    head = np.asarray(eagle_net.borrow(whole, model.params)["head"])
    save_factors(where / "drafter", truncated(head, 4), weights)
    (where / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    return where


@pytest.fixture
def app(home, tmp_path, monkeypatch, capfd):
    """Runs an app in a folder of its own: (exit status, its stdout and stderr, what it wrote last)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(module, *arguments):
        name = module.__name__.rpartition(".")[2]
        common = [
            f"model.source={home / 'model'}",
            f"drafter.checkpoint={home / 'drafter'}",
            "tracking.wandb=disabled",
        ]
        if name in ("record", "benchmark", "load"):
            common += [f"data.path={home / 'prompts.jsonl'}", "data.max_new_tokens=10"]
        if name in ("replay", "benchmark", "load"):
            common += ["costs.repeats=1"]
        monkeypatch.setattr(
            sys,
            "argv",
            [name, *(a for a in arguments if a == "-m"), *common, *(a for a in arguments if a != "-m")],
        )
        code = 0
        try:
            conf.run_app(module.main, name)
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def recorded(home) -> Path:
    """One recording for all replays, made by the app."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        given = [
            f"model.source={home / 'model'}",
            f"drafter.checkpoint={home / 'drafter'}",
            "tracking.wandb=disabled",
        ]
        given += [
            f"data.path={home / 'prompts.jsonl'}",
            "data.max_new_tokens=10",
            "heads=[own,r4c20]",
            SHAPES,
        ]
        patch.setattr(
            sys, "argv", ["record", *given, "depth=3", "probs=[own]", "group=2", "output=recording"]
        )
        conf.run_app(record.main, "record")
    return home / "recording"


def judged(where: Path) -> list[list[dict]]:
    return [json.loads(p.read_text()) for p in sorted(where.glob("runs/**/replay.json"))]


HERE = ["drafter_head=own", "tree.depth=3", "costs.table=hardware:cpu_2core"]


def test_a_recording_holds_every_prompt_head_and_shape(recorded):
    about, answers = read(recorded)
    assert sorted(a.prompt_id for a in answers) == ["one", "three", "two"]
    names = {f"{head}_{shape}" for head in ("own", "r4c20") for shape in ("w1k1", "w2k3")}
    assert {v.name for v in about.variants} == names == set(answers[0].trees)
    for answer in answers:
        assert np.isfinite(answer.trees["own_w2k3"].prob[answer.trees["own_w2k3"].score > -np.inf]).all()
        assert np.isnan(answer.trees["r4c20_w2k3"].prob).all()


def test_a_replay_judges_a_grid_and_what_bounds_it(app, recorded, tmp_path):
    code, out, err = app(
        replay, *HERE, f"recording={recorded}", "grid=[{policy.tau: [0, 1, 3], policy.nodes: [2, 8]}]"
    )
    assert code == 0, err
    (found,) = judged(tmp_path)
    kinds = [o["kind"] for o in found]
    assert kinds[:6] == ["policy"] * 6
    assert (kinds.count("oracle"), set(kinds[6:])) == (1, {"fixed", "oracle"})
    oracle = found[kinds.index("oracle")]["speedup"]
    assert oracle >= max(o["speedup"] for o in found[:6]) - 1e-6
    assert "oracle" in out
    for o in found[:6]:
        assert o["ms_per_token"] * o["tokens"] == pytest.approx(
            (o["first_ms"] + o["steps_ms"] + o["verify_ms"]) * o["rounds"], rel=1e-4
        )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter_head=r9c9"], "r9c9_w2k3 is outside the recording, which has own_w1k1"),
        (["tree.depth=4"], "tree.depth=4 is outside the recording, which is 3 deep"),
        (["shape=[3,3]"], "own_w3k3 is outside the recording"),
        (["shape=[3]"], "shape must be a width and a number of children"),
        (["grid=[{policy.tua: [1]}]"], "grid key 'policy.tua' is not known"),
        (["grid=[{policy.tau: []}]"], "grid.policy.tau must list at least one value"),
        (["batch=0"], "batch must be a whole number of at least 1"),
        (["tree=static"], "tree.kind=static is not recorded"),
        (["recording=nowhere"], "nowhere is not a recording"),
        (["sampling=t1"], "is a recording of another sampling"),
    ],
)
def test_what_was_not_recorded_is_said_and_not_clamped(app, recorded, overrides, said):
    code, _, err = app(replay, *HERE, f"recording={recorded}", *overrides)
    assert code == 2
    assert said in err


def test_another_drafter_s_recording_is_refused(app, home, recorded, tmp_path):
    model = load(home / "model")
    spec = eagle_net.complete(
        EagleSpec(fc_norm=True, norm_output=True, draft_vocab=40, target_rows=True), model.spec
    )
    weights = initialise(eagle_net.abstract(spec, model.spec), jax.random.key(1))
    weights["draft_ids"] = np.arange(40, dtype=np.int32)
    save_drafter(tmp_path / "other", Trained(spec, weights), model.spec, model.params, "")
    code, _, err = app(replay, *HERE, f"recording={recorded}", f"drafter.checkpoint={tmp_path / 'other'}")
    assert code == 2
    assert "is a recording of another drafter" in err


def test_recording_goes_on_where_it_was_and_refuses_other_settings(app, recorded):
    before = sorted(p.name for p in recorded.iterdir())
    same = ["heads=[own,r4c20]", SHAPES, "depth=3", "probs=[own]", f"output={recorded}"]
    code, out, _ = app(record, *same)
    assert code == 0
    assert "3 answers are recorded, 0 to do" in out
    assert sorted(p.name for p in recorded.iterdir()) == before
    code, _, err = app(record, *same[:2], "depth=2", f"output={recorded}", "probs=[]")
    assert code == 2
    assert "another depth" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["heads=[tall]", "probs=[]"], "head 'tall' is not known"),
        (["heads=[r4c20]"], "probs names r64c256, which is not among heads"),
        (["shapes=[[1]]"], "shapes must list pairs"),
        (["method=prompt_lookup"], "has no network whose trees could be recorded"),
        (["depth=0"], "depth must be a whole number of at least 1"),
    ],
)
def test_mistakes_in_a_recording_cost_one_line(app, overrides, said):
    code, _, err = app(record, *overrides)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


# --- every experiment file, in a fast form ---

MODELLED = "costs.table=hardware:cpu_2core"
REPLAYED = {
    "ablate_depth_width": (4, ["-m", "drafter_head=own", MODELLED, "tree.depth=1,3", "shape=[1,1],[2,3]"]),
    "ablate_rank_candidates": (2, ["-m", MODELLED, "tree.depth=3", "drafter_head=own,r4c20"]),
    "ablate_threshold": (1, ["drafter_head=own", MODELLED, "tree.depth=3"]),
    "ablate_calibration": (1, ["drafter_head=own", MODELLED, "tree.depth=3"]),
    "table2_load_b300": (2, ["-m", "drafter_head=own", "tree.depth=3", "batch=1,512"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_experiments_run(app, recorded, tmp_path, name):
    count, overrides = REPLAYED[name]
    code, _, err = app(replay, f"recording={recorded}", f"+experiment={name}", *overrides)
    assert code == 0, err
    jobs = judged(tmp_path)
    assert len(jobs) == count
    assert all(np.isfinite(o["speedup"]) for job in jobs for o in job)


@pytest.mark.slow
def test_measured_experiments_run(app, tmp_path):
    heads = "heads=[own,full,r4c20]"
    assert app(draft_cost, "+experiment=figure2_head", heads, "rows=[1]", "repeats=1", "context=16")[0] == 0
    small = ["drafter.retrieval=null", "compare=[]"]
    assert app(load_app, "+experiment=table2_load", "batch=[1,2]", "repeats=1", *small)[0] == 0
    assert (
        app(benchmark, "+experiment=table5_cpu", "phase_tokens=0", "compare=[prompt_lookup]", small[0])[0]
        == 0
    )
    kept = {p.name for p in tmp_path.glob("runs/**/*.json")}
    assert {"draft_cost.json", "load.json", "summary.json"} <= kept
