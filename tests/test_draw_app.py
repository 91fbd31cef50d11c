"""The app that draws rounds: what it draws is what the loop did."""

import sys

import numpy as np
import pytest
from tiny_model import write_model

from eagle4 import answer, conf, text
from eagle4.methods import build_method
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, SamplingSpec, TreeSpec
from eagle4.target.load import load
from eagle4.watch import watch
from experiments import draw as app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def test_watched_rounds_are_those_of_the_jitted_loop(folder):
    model = load(folder)
    words = text.load_text(model.tokenizer)
    tree = TreeSpec("dynamic", 3, 2, 2, 6, buckets=(6,))
    drafter = DrafterSpec("prompt_lookup", 1, 3, matches=2)
    parts = (model.spec, SamplingSpec(), model.params)
    method = build_method("lookup", drafter, tree, PolicySpec(), "point_mass", *parts)
    ids = text.encode_chat(words, [{"role": "user", "content": "abc def"}])
    seen = [int(v.num_accepted[0]) for _, v in watch(method, words, ids, 0, 24)]
    limits = answer.Limits(24)
    reply = answer.answer(method.system, method.params, method.policy, words, ids, 0, limits, 512)
    assert seen == np.asarray(reply.rounds.num_accepted)[:, 0].tolist()
    assert max(seen) > 0


def run(monkeypatch, where, folder, *overrides):
    monkeypatch.chdir(where)
    common = (f"model.source={folder}", "tracking.wandb=disabled", "max_new_tokens=12", "drafter.min_ngram=1")
    monkeypatch.setattr(sys, "argv", ["draw", *common, *overrides])
    conf.run_app(app.main, "draw")


def test_every_round_is_drawn_on_one_page(folder, tmp_path, monkeypatch, capsys):
    run(monkeypatch, tmp_path, folder, "prompt=abc def abc def")
    (path,) = tmp_path.glob("runs/*/*/rounds.html")
    page, printed = path.read_text(), capsys.readouterr().out
    assert page.count("<svg") == page.count("<h3>") == printed.count("accepted\n") > 0


def test_an_empty_prompt_costs_one_line(folder, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, tmp_path, folder, "prompt=' '")
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert "prompt must be one text" in printed
