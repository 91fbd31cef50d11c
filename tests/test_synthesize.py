"""Generated data: the store keeps what it is given, and answers are the target's own."""

from dataclasses import replace

import numpy as np
import pytest
from kit import TINY, plain_greedy, tiny_params
from tiny_tokenizer import from_gguf

from eagle4 import text
from eagle4.errors import BadInput
from eagle4.prompts import Prompt
from eagle4.serve import Shape
from eagle4.specs import SamplingSpec
from eagle4.train import synthesize
from eagle4.train.responses import Response, append_shard, count, read_responses, shards

ROWS = [
    Response("a/1", [], [5, 65535, 0], 0.0, True),
    Response("written/000001", [7, 8], [1], 0.8, False),
    Response("ü/3", [], [2, 2], 0.0, True),
]


def test_the_store_keeps_responses_in_order(tmp_path):
    append_shard(tmp_path, ROWS[:2])
    append_shard(tmp_path, ROWS[2:])
    stored = list(read_responses(tmp_path))
    assert [r._replace(temperature=round(r.temperature, 6)) for r in stored] == ROWS
    assert [p.name for p in shards(tmp_path)] == ["responses_00000.npz", "responses_00001.npz"]
    assert count(tmp_path)[:2] == (3, 6)
    with np.load(shards(tmp_path)[0]) as data:
        assert data["answer"].dtype == np.uint16


def test_larger_vocabularies_get_wider_tokens(tmp_path):
    append_shard(tmp_path, [Response("a", [], [70000], 0.0, True)])
    assert next(read_responses(tmp_path)).answer == [70000]


def test_a_damaged_shard_is_named(tmp_path):
    path = append_shard(tmp_path, ROWS)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadInput, match=r"responses_00000\.npz is damaged"):
        list(read_responses(tmp_path))


def test_only_unanswered_prompts_are_asked_each_text_once():
    prompts = [
        Prompt("a", "s", "c", ("x",)),
        Prompt("b", "s", "c", ("y",)),
        Prompt("c", "s", "c", ("y", "z")),
    ]
    assert list(synthesize.turns_of(prompts, {"a"})) == [("b", "y")]


@pytest.fixture(scope="module")
def words():
    return from_gguf()


def test_the_opening_stops_where_the_users_words_begin(words):
    ids = synthesize.opening(words)
    whole = text.encode_chat(words, [{"role": "user", "content": "hello"}])
    assert whole[: len(ids)] == ids
    assert "hello" in text.decode(words, whole[len(ids) :])
    with pytest.raises(BadInput, match="does not show the user's turn"):
        synthesize.opening(replace(words, template="always the same"))


def test_answers_are_the_targets_own_and_long_prompts_are_left_out(words):
    spec = replace(TINY, vocab_size=len(words.pieces))
    weights = tiny_params(spec)
    asked = [("a", "one"), ("long", "word " * 400), ("b", "two three")]
    told: list[int] = []
    shape = Shape(batch=2, capacity=256, refill=2, stretch=4)
    args = (weights, spec, words, asked, SamplingSpec(), 6, shape, told.append)
    answers = {r.prompt_id: r for r in synthesize.answers(*args)}
    assert set(answers) == {"a", "b"}
    assert sorted(told) == sorted(len(r.answer) for r in answers.values())
    for name, turn in (asked[0], asked[2]):
        ids = text.encode_chat(words, [{"role": "user", "content": turn}])
        assert answers[name].answer == plain_greedy(weights, spec, ids, 6, words.stop_ids)
        assert answers[name].finished == (answers[name].answer[-1] in words.stop_ids)
