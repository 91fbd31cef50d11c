"""Prompts from a data set by name: the user's turns of each known form, and one line for what can't be had."""

import sys
from types import SimpleNamespace

import pytest

from eagle4 import dataset_prompts
from eagle4.errors import BadInput
from eagle4.prompts import Prompt, load_prompts


def stub(monkeypatch, rows, asked=None):
    def load_dataset(name, split, streaming):
        if asked is not None:
            asked.append((name, split, streaming))
        if name == "owner/none":
            raise FileNotFoundError("no such set\nand more")
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ("a",)),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ("a",)),
        ({"prompt": "a", "chosen": "b"}, ("a",)),
        ({"turns": ["a", " ", "c"]}, ("a", "c")),
        ({"instruction": "", "output": "b"}, ()),
        ({"text": "a"}, None),
    ],
)
def test_the_users_turns_are_found(row, turns):
    assert dataset_prompts.user_turns(row) == turns


def test_a_set_is_streamed_as_far_as_asked(monkeypatch):
    asked = []
    stub(monkeypatch, iter([{"prompt": "a"}, {"prompt": ""}, {"prompt": "c"}, {"prompt": "d"}]), asked)
    found = load_prompts("dataset:owner/set:test", limit=3)
    name = "owner/set"
    assert found == [Prompt(f"{name}/0", name, name, ("a",)), Prompt(f"{name}/2", name, name, ("c",))]
    assert asked == [(name, "test", True)]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("dataset:", "names no data set"),
        ("dataset:owner/none", r"can't be had \(no such set\)"),
        ("dataset:owner/set", "has none of the columns"),
    ],
)
def test_what_cant_be_had_costs_one_line(monkeypatch, path, said):
    stub(monkeypatch, [{"text": "a"}])
    with pytest.raises(BadInput, match=said):
        load_prompts(path)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="pip install datasets"):
        load_prompts("dataset:owner/set")
