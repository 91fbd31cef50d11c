"""The app that times draft steps: every part at every size, as shares of the plain step of the same run."""

import json
import sys

import jax
import pytest
from tiny_model import write_model

from eagle4 import conf
from eagle4.checkpoint import Trained, save_drafter
from eagle4.drafters import eagle_net
from eagle4.nn.abstract import initialise
from eagle4.specs import EagleSpec
from eagle4.target.load import load
from experiments import draft_cost as app


def run(monkeypatch, where, *overrides):
    monkeypatch.chdir(where)
    source = write_model(where / "model")
    model = load(source)
    for name, spec in (
        ("eagle1", EagleSpec("concat2")),
        ("eagle3_1", EagleSpec(fc_norm=True, norm_output=True)),
    ):
        spec = eagle_net.complete(spec, model.spec)
        weights = initialise(eagle_net.abstract(spec, model.spec), jax.random.key(0))
        save_drafter(where / name, Trained(spec, weights), model.spec, model.params, "")
    shared = [f"model.source={source}", "tracking.wandb=disabled", "repeats=2", "context=16", "rows=[1,4]"]
    monkeypatch.setattr(sys, "argv", ["draft_cost", *shared, *overrides])
    conf.run_app(app.main, "draft_cost")


@pytest.mark.parametrize("name", ["eagle1", "eagle3_1"])
def test_all_parts_are_timed_beside_a_plain_step(tmp_path, monkeypatch, name):
    run(monkeypatch, tmp_path, f"method={name}", f"drafter.checkpoint={name}")
    (path,) = tmp_path.glob("runs/*/*/draft_cost.json")
    rows = json.loads(path.read_text())
    assert [(r["what"], r["rows"]) for r in rows] == [
        ("plain decode step", 1),
        *((what, n) for n in (1, 4) for what in ("body", "feed", f"head {name}", f"step {name}")),
    ]
    for row in rows:
        assert row["share"] == pytest.approx(row["ms"] / rows[0]["ms"])


def test_heads_are_timed_side_by_side_in_one_run(tmp_path, monkeypatch):
    run(
        monkeypatch,
        tmp_path,
        "method=eagle3_1",
        "drafter.checkpoint=eagle3_1",
        "heads=[own,full]",
        "rows=[2]",
    )
    (path,) = tmp_path.glob("runs/*/*/draft_cost.json")
    named = [r["what"] for r in json.loads(path.read_text())]
    assert named == ["plain decode step", "body", "feed", "head own", "step own", "head full", "step full"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=prompt_lookup"], "method 'prompt_lookup' drafts without a network; use eagle1"),
        (["drafter.checkpoint=eagle3_1", "heads=[tall]"], "head 'tall' is not known; use own, full"),
        (["rows=[0]"], "rows must list whole numbers in 1..64"),
        (
            ["rows=[32]", "drafter.checkpoint=eagle3_1"],
            "context=16 must be at least the largest of rows=[32]",
        ),
    ],
)
def test_bad_numbers_cost_one_line(tmp_path, monkeypatch, capsys, overrides, said):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, tmp_path, *overrides)
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert said in printed
