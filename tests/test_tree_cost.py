"""The app that times trees: every kind and verifier is there, and shares are of the plain step of the same run."""

import json
import sys

import numpy as np
import pytest
from tiny_model import write_model

from eagle4 import conf, tree_cost
from eagle4.tree_cost import CANDIDATES, random_table
from eagle4.verify import VERIFIERS
from experiments import tree_cost as app


def run(monkeypatch, where, *overrides):
    monkeypatch.chdir(where)
    source = f"model.source={write_model(where / 'model')}"
    monkeypatch.setattr(
        sys, "argv", ["tree_cost", source, "tracking.wandb=disabled", "repeats=2", *overrides]
    )
    conf.run_app(app.main, "tree_cost")


def test_all_trees_and_verifiers_are_timed_beside_a_plain_step(tmp_path, monkeypatch):
    run(monkeypatch, tmp_path, "tree.depth=3", "tree.nodes=6", "tree.width=2", "tree.children=2")
    (path,) = tmp_path.glob("runs/*/*/tree_cost.json")
    rows = json.loads(path.read_text())
    grown, checked = [f"grow {k}" for k in tree_cost.GROWN], [f"verify {v}" for v in VERIFIERS]
    assert [r["what"] for r in rows] == ["plain decode step", *grown, *checked]
    for row in rows:
        assert row["share"] == pytest.approx(row["ms"] / rows[0]["ms"])


def test_a_static_tree_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, tmp_path, "tree=static")
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert "give tree=dynamic" in printed


def test_the_random_table_is_a_proposal():
    table = random_table(500)
    assert table["ids"].shape == (500, CANDIDATES)
    assert all(len(set(row)) == CANDIDATES for row in np.asarray(table["ids"]).tolist())
    np.testing.assert_allclose(np.asarray(table["probs"]).sum(1), 1, atol=1e-5)
