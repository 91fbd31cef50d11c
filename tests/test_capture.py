"""Captured features are the target's own, whatever shares their batch; documents are template plus answer."""

import shutil
import sys
from collections import namedtuple
from dataclasses import replace

import jax
import numpy as np
import pytest
from kit import TINY, numpy_logits, tiny_params
from tiny_model import write_model
from tiny_tokenizer import END, TEMPLATE, from_gguf

from eagle4 import conf, text
from eagle4.drafters.eagle_net import default_taps
from eagle4.errors import BadInput
from eagle4.prompts import Prompt
from eagle4.target.load import load
from eagle4.text import load_text
from eagle4.train import capture, features
from eagle4.train.capture import Counts, Turn
from eagle4.train.responses import Response, append_shard
from eagle4.train.step import capture_chunk
from experiments import capture as app

ASKED = {"a": "one two", "b": "say the word", "c": "one two"}
PROMPTS = [Prompt(name, "s", "c", (turn, "more")) for name, turn in ASKED.items()]


@pytest.fixture(scope="module")
def words():
    return from_gguf()


def response(name, answer, written=()):
    return Response(name, list(written), list(answer), 0.0, True)


def opening(turn: str) -> list[int]:
    """The tiny template, written out here by hand."""
    shown = f"<|start|>system\nBe brief.<|end|>\n<|start|>user\n{turn}<|end|>\n<|start|>assistant\n"
    return from_gguf().tokenizer.encode(shown, add_special_tokens=False).ids


# ---- documents


def test_a_document_is_template_and_answer_and_only_the_answer_is_supervised(words):
    written = words.tokenizer.encode(" my own the turn\n", add_special_tokens=False).ids
    given = [response("b", [7, 8, END]), response("a", [9]), response("written/000001", [5, 6], written)]
    turns, counts = capture.documents(words, given, PROMPTS, 512)
    assert counts == Counts(0, 0, 0, 0)
    wanted = {
        "a": (opening("one two"), [9]),
        "b": (opening("say the word"), [7, 8, END]),
        "written/000001": (opening("my own the turn"), [5, 6]),
    }
    assert {turn.name for turn in turns} == set(wanted)
    for turn in turns:
        asked, answer = wanted[turn.name]
        assert turn.tokens.tolist() == asked + answer
        assert turn.supervised.tolist() == [False] * len(asked) + [True] * len(answer)
        assert turn.tokens.dtype == np.int32


def test_the_order_is_drawn_from_the_names(words):
    given = [response(f"written/{i}", [i], [i + 40, 9]) for i in range(20)]
    orders = []
    for responses in (given, given[::-1]):
        turns, _ = capture.documents(words, responses, [], 512)
        orders.append([turn.name for turn in turns])
    assert orders[0] == orders[1] == sorted(orders[0], key=lambda name: features.chance(name, "order"))
    assert orders[0] not in ([r.prompt_id for r in given], [r.prompt_id for r in given[::-1]])


def test_what_gives_no_document_is_counted(words):
    n = len(opening("one two"))
    given = [
        response("a", [1, 2, 3]),
        response("a", [1, 2, 4]),  # the same prompt again
        response("c", [1, 2, 3]),  # the same text under another name
        response("missing", [1]),
        response("b", [1]),  # its prompt is longer: no answer left
    ]
    turns, counts = capture.documents(words, given, PROMPTS, n + 2)
    assert [(t.name, t.tokens.tolist()) for t in turns] == [("a", [*opening("one two"), 1, 2])]
    assert len(opening("say the word")) >= n + 2
    assert counts == Counts(cropped=1, without_prompt=1, repeated=2, without_answer=1)


def test_no_document_at_all_costs_one_line(words):
    with pytest.raises(BadInput, match="none of the 1 responses answers a given prompt; name the file"):
        capture.documents(words, [response("missing", [1])], PROMPTS, 512)
    for given, length in ((response("a", [1]), 4), (response("a", []), 512)):
        with pytest.raises(BadInput, match="the loss mask is empty"):
            capture.documents(words, [given], PROMPTS, length)


DIRECT = (
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]"
    "{% else %} {{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [TEMPLATE, DIRECT])
def test_templates_that_place_the_answer_are_taken(words, template):
    capture._require_answer_place(replace(words, template=template))


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.partition("{% if add_generation_prompt")[0],
        "always the same",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_without_a_place_for_the_answer_is_refused(words, template):
    with pytest.raises(BadInput, match="no place for the assistant's answer"):
        capture.documents(replace(words, template=template), [response("a", [1])], PROMPTS, 512)


# ---- shapes


def turn_of(n: int, name: str = "", vocab: int = TINY.vocab_size) -> Turn:
    rng = np.random.default_rng(n)
    return Turn(name or f"t{n}", rng.integers(0, vocab, n).astype(np.int32), np.arange(n) >= n // 2)


def test_widths_hold_the_length_closely_and_are_few():
    lengths = np.arange(1, 4097)
    widths = np.array([capture.width(int(n)) for n in lengths])
    assert (widths >= lengths).all()
    assert (widths - lengths < np.maximum(32, lengths / 8)).all()
    assert (widths % 32 == 0).all()
    assert len(set(widths[:512])) == 16
    assert len(set(widths)) <= 40


def test_every_turn_is_in_one_batch_with_turns_of_its_length():
    rng = np.random.default_rng(0)
    turns = [turn_of(int(n), f"t{i}") for i, n in enumerate(rng.integers(1, 500, 200))]
    groups = list(capture.batches(turns))
    assert sorted(t.name for g in groups for t in g) == sorted(t.name for t in turns)
    widths = [capture.width(max(len(t.tokens) for t in g)) for g in groups]
    assert all(len(g) == capture.rows_of(w) for g, w in zip(groups[:-1], widths))
    assert all(capture.rows_of(w) * w <= max(capture.BATCH_TOKENS, w) for w in widths)
    flat = [len(t.tokens) for g in groups for t in g]
    assert flat == sorted(flat, reverse=True)


def test_windows_are_consecutive_and_close_when_full():
    turns = [turn_of(n) for n in (3, 4, 5, 1, 9, 2)]
    sizes = [[len(t.tokens) for t in w] for w in capture.windows(iter(turns), 7)]
    assert sizes == [[3, 4], [5, 1, 9], [2]]


def test_default_taps_are_low_middle_and_high():
    assert default_taps(30) == (2, 15, 27)
    for layers in (1, 2, 3, 4, 36):
        capture.require_taps(default_taps(layers), layers)


@pytest.mark.parametrize("taps", [[], [1, 1], [-1], [31], [1.5], ["a"], [True]])
def test_bad_taps_are_refused(taps):
    with pytest.raises(BadInput, match="hidden_states ind"):
        capture.require_taps(taps, 30)


# ---- the pass

TAPS = (0, 1, 2)


def captured(folder, turns, shard_tokens=1000, told=lambda n: None, compiled=capture_chunk):
    params = tiny_params()
    mark = features.fingerprint("tiny", TINY, params, TAPS)
    done = features.start(folder, mark, 0.0, 64)
    todo = [turn for turn in turns if turn.name not in done]
    left_out = capture.capture(folder, compiled, params, TINY, TAPS, todo, shard_tokens, told)
    store = features.open_store(folder, mark)
    read = (features.read(store, i) for i in range(features.size(store)))
    return {document.name: document for document in read}, left_out


def close(found, wanted):
    """Equal up to the rounding of bfloat16 and float32's own."""
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=2e-3)


def test_features_are_the_targets_own_whatever_shares_the_batch(tmp_path):
    turns = [turn_of(n) for n in (5, 31, 32, 33, 2, 64, 17, 40, 1)]
    heard: list[int] = []
    found, left_out = captured(tmp_path, turns, told=heard.append)
    assert set(found) == {turn.name for turn in turns}
    assert left_out == []
    assert sum(heard) == sum(len(turn.tokens) for turn in turns)
    params = tiny_params()
    eye = np.eye(TINY.hidden_size, dtype=np.float32)
    first = params | {"layers": params["layers"][:1], "head": eye}
    for turn in turns:
        document = found[turn.name]
        assert document.tokens.tolist() == turn.tokens.tolist()
        assert document.supervised.tolist() == turn.supervised.tolist()
        # With the unit matrix for a head, the oracle's logits are its normed hidden states, also of a cut model.
        close(document.hidden, numpy_logits(params | {"head": eye}, TINY, turn.tokens))
        embedded, middle, last = np.moveaxis(np.asarray(document.features, np.float64), 1, 0)
        close(embedded, np.asarray(params["embed"])[turn.tokens])
        close(normed(middle, params), numpy_logits(first, replace(TINY, num_layers=1), turn.tokens))
        close(normed(last, params), numpy_logits(params | {"head": eye}, TINY, turn.tokens))


def normed(x, params):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + TINY.rms_norm_eps) * np.asarray(params["norm"])


def test_an_interrupt_keeps_what_is_computed(tmp_path):
    turns = [turn_of(n, f"t{i}") for i, n in enumerate([64] * 40 + [20] * 70)]
    calls = []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return capture_chunk(*args)

    with pytest.raises(KeyboardInterrupt):
        captured(tmp_path, turns, 10**6, compiled=interrupted)
    some, _ = captured(tmp_path, [])
    assert 0 < len(some) < 40
    every, _ = captured(tmp_path, turns)
    assert set(every) == {turn.name for turn in turns}
    whole, _ = captured(tmp_path / "whole", turns)
    assert all(every[n].hidden.tobytes() == whole[n].hidden.tobytes() for n in whole)


def test_documents_that_are_not_finite_are_named(tmp_path):
    turns = [turn_of(5), turn_of(9)]

    def poisoned(*args):
        tapped, hidden = capture_chunk(*args)
        return tapped, hidden.at[0, 3].set(np.nan)  # the longest comes first

    found, left_out = captured(tmp_path, turns, compiled=poisoned)
    assert left_out == ["t9"]
    assert set(found) == {"t5"}


def test_batches_of_one_width_compile_once():
    params = tiny_params()
    jitted = jax.jit(capture.chunk, static_argnames=("spec", "taps"))
    for lengths in ([40, 60], [64], [33, 33, 50]):
        capture.run(jitted, params, TINY, TAPS, [turn_of(n) for n in lengths])
    assert jitted._cache_size() == 2


Usage = namedtuple("Usage", "total used free")
MARK = features.Fingerprint("m", "s", "w", (2, 15, 27), 576)


def test_room_is_counted_before_anything_is_written(tmp_path, monkeypatch):
    each = 3 * 576 * 2 + 576 * 2 + 4 + 1
    folder = tmp_path / "not" / "there"
    for free, fits in ((1000 * each + 10**9, True), (1000 * each + 10**9 - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        if fits:
            assert capture.room(folder, MARK, 1000) == (each, 1000 * each, free)
        else:
            with pytest.raises(
                BadInput, match=r"take 0\.00 GB and 1 GB must stay free, but the disk has 1\.00 GB"
            ):
                capture.room(folder, MARK, 1000)
    assert not folder.parent.exists()


# ---- the app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def run(monkeypatch, where, model, *overrides):
    monkeypatch.chdir(where)
    given = (f"model.source={model}", "store=answers", "features=out", "taps=[0,1]", "data.path=p.jsonl")
    monkeypatch.setattr(sys, "argv", ["capture", *given, *overrides])
    conf.run_app(app.main, "capture")


@pytest.fixture
def answered(tmp_path, model):
    lines = (f'{{"id": "{i}", "suite": "s", "category": "c", "turns": ["turn {i}"]}}\n' for i in range(12))
    (tmp_path / "p.jsonl").write_text("".join(lines))
    append_shard(tmp_path / "answers", [response(str(i), [i, i + 1, END]) for i in range(12)])
    return tmp_path


def test_the_app_goes_on_where_it_stopped(answered, model, monkeypatch, capsys):
    run(monkeypatch, answered, model, "limit=5", "shard_tokens=100")
    assert "0 documents are done, 5 to do: " in capsys.readouterr().out
    run(monkeypatch, answered, model)
    assert "5 documents are done, 7 to do: " in capsys.readouterr().out
    checkpoint = load(model)
    mark = features.fingerprint(str(model), checkpoint.spec, checkpoint.params, (0, 1))
    store = features.open_store(answered / "out", mark)
    documents = [features.read(store, i) for i in range(features.size(store))]
    assert sorted(int(d.name) for d in documents) == list(range(12))
    words = load_text(checkpoint.tokenizer)
    for document in documents:
        i = int(document.name)
        asked = text.encode_chat(words, [{"role": "user", "content": f"turn {i}"}])
        assert document.tokens.tolist() == [*asked, i, i + 1, END]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["store=nowhere"], "there are no responses in nowhere; run python -m experiments.synthesize first"),
        (["data.path=null"], "none of the 12 responses answers a given prompt"),
        (["taps=[0,2]"], "tap 2 is not a hidden_states index of the model; they are 0..1"),
        (["taps=3"], "taps must be a list"),
        (["max_length=2000"], "max_length=2000 exceeds the model's 1024 positions"),
        (["max_length=0"], "max_length must be a whole number of at least 1"),
        (["limit=0"], "limit must be a whole number of at least 1"),
        (["held_out=1"], "held_out must be a share in [0, 1)"),
        (["max_length=3"], "the loss mask is empty"),
    ],
)
def test_mistakes_cost_one_line(answered, model, monkeypatch, capsys, overrides, told):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, answered, model, *overrides)
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert told in printed
    assert not (answered / "out").exists()
    assert not (answered / "nowhere").exists()


def test_answers_of_another_model_are_refused(answered, model, monkeypatch, capsys):
    (answered / "answers" / "model.txt").write_text("other\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, answered, model)
    assert "holds answers of other" in capsys.readouterr().err


def test_a_disk_that_is_short_stops_the_app_before_it_writes_features(answered, model, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 10**9))
    with pytest.raises(SystemExit):
        run(monkeypatch, answered, model)
    assert "1 GB must stay free" in capsys.readouterr().err
    assert not list(answered.glob("out/*.npy"))
