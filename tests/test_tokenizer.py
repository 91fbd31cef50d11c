"""Loading tokenizers: a folder and GGUF metadata agree, splits are the published ones, faults are named."""

from pathlib import Path

import pytest
from tiny_tokenizer import (
    END,
    HE,
    SPLIT,
    START,
    STOP,
    THE,
    THINK,
    from_folder,
    from_gguf,
    shown,
    write_folder,
)
from tokenizers import Tokenizer, decoders, models

from eagle4.errors import BadInput
from eagle4.text import TokenizerSource, decode, encode, encode_chat, load_text

TEXTS = [
    "",
    "the he  the\n\n the ab;c 12345 x1 23",
    "naïve 日本 😀😃 👩‍👧 ½ Ⅷ ١٢",
    "  lead\t\ttabs \r\n and   trailing   ",
    "don't  can’t I'LL\u00a0nbsp\u2028line",
    "<|start|>user\nhi<|end|> <think> <|en",
    "def f(x):\n\treturn  [x**2,\n            1_000]\n\n\n#",
]


def test_folder_and_gguf_encode_alike(tmp_path):
    tiny = from_gguf()
    folder = from_folder(write_folder(tmp_path))
    for string in TEXTS:
        ids = encode(tiny, string)
        assert encode(folder, string) == ids
        assert (
            decode(tiny, ids) == decode(folder, ids) == folder.tokenizer.decode(ids, skip_special_tokens=True)
        )
    assert folder.stop_ids == tiny.stop_ids == (END,)
    assert folder.pieces == tiny.pieces
    messages = [{"role": "user", "content": "the"}]
    assert encode_chat(folder, messages) == encode_chat(tiny, messages)


def test_hand_drawn_ids():
    tiny = from_gguf()
    assert encode(tiny, "the the") == [ord("t"), HE, THE]
    assert encode(tiny, "é<|end|>123") == [0xC3, 0xA9, END, ord("1"), ord("2"), ord("3")]
    assert encode(tiny, "<think> the😀") == [THINK, THE, 262, 0x80]
    assert decode(tiny, [*"é".encode(), END, THINK, 258]) == "é<think> the"


@pytest.mark.parametrize(
    ("pre", "string", "pieces"),
    [
        ("smollm", "x 1234's  \n y", ["x", "Ġ", "1", "2", "3", "4", "'s", "ĠĠĊ", "Ġy"]),
        ("starcoder", "x 12", ["x", "Ġ", "1", "2"]),
        ("gpt-2", "x 1234's  \n y", ["x", "Ġ1234", "'s", "ĠĠĊ", "Ġy"]),
        ("qwen2", "x 1234'S (a)\n\n y", ["x", "Ġ", "1", "2", "3", "4", "'S", "Ġ(", "a", ")ĊĊ", "Ġy"]),
        ("llama-bpe", "x.b 1234'S\n y", ["x", ".b", "Ġ", "123", "4", "'S", "Ċ", "Ġy"]),
        ("default", "a,b 1234", ["a", ",", "b", "Ġ", "123", "4"]),
    ],
)
def test_pre_tokenizers_split_as_described(pre, string, pieces):
    split = from_gguf(pre=pre).tokenizer.pre_tokenizer.pre_tokenize_str(string)
    assert [piece for piece, _ in split] == pieces


def test_a_file_without_pre_is_the_default_and_llama_takes_whole_words():
    assert encode(from_gguf(pre=None), "1234") == encode(from_gguf(pre="default"), "1234") == [260, ord("4")]
    # Without its merge "123" is reached only by taking the word as it stands, as Llama 3's tokenizer does.
    merges = [f"{shown(a)} {shown(b)}" for a, b in SPLIT if a != b"12"]
    assert encode(from_gguf(pre="llama-bpe", merges=merges), "123") == [260]
    assert encode(from_gguf(pre="gpt-2", merges=merges), "123") == [259, ord("3")]
    assert from_gguf(pre="llama-bpe", add_bos_token=None).bos_id == START
    assert from_gguf(pre="qwen2", add_bos_token=None).bos_id is None
    assert encode(from_gguf(pre="qwen2"), "e\u0301") == list("é".encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"model": "llama"}, "tokenizer kind 'llama' is not supported"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": ["zz yy"]}, "damaged"),
        ({"merges": ["zzyy"]}, "damaged"),
        ({"eos_token_id": 9999}, "eos_token_id 9999"),
        ({"eos_token_id": None}, "no stop id"),
    ],
)
def test_gguf_faults_are_named(changes, message):
    with pytest.raises(BadInput, match=message) as caught:
        from_gguf(**changes)
    assert "tiny.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stop_ids_of_a_gguf_are_eos_eot_and_eom():
    assert from_gguf(eot_token_id=STOP, eom_token_id=END).stop_ids == (END, STOP)


@pytest.mark.parametrize(
    ("generation", "stop_ids"),
    [({}, (END,)), ({"eos_token_id": STOP}, (STOP, END)), ({"eos_token_id": [STOP, END]}, (STOP, END))],
)
def test_stop_ids_of_a_folder(tmp_path, generation, stop_ids):
    assert from_folder(write_folder(tmp_path, generation=generation)).stop_ids == stop_ids


def test_stop_ids_fall_back_to_the_model_config(tmp_path):
    write_folder(tmp_path, {"eos_token": None})
    with pytest.raises(BadInput, match="no stop id"):
        from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert from_folder(tmp_path).stop_ids == (7,)


def test_folder_faults_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    write_folder(tmp_path, {"eos_token": "<nowhere>"})
    with pytest.raises(BadInput, match="'<nowhere>' is not in"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer_config\.json is not valid JSON"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"tokenizer\.json cannot be read"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("bos", "flag", "leads"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_bos_once_or_never(tmp_path, bos, flag, leads):
    text = from_folder(write_folder(tmp_path, {"add_bos_token": flag}, bos=bos))
    assert encode(text, "he") == [START] * leads + [HE]
    assert encode(text, "<|start|>he") == [START, HE]
    assert encode_chat(text, [{"role": "system", "content": "he"}])[:2] == [START, ord("s")]


def test_a_tokenizer_file_cannot_truncate_prompts(tmp_path):
    assert encode(from_folder(write_folder(tmp_path)), "x" * 50) == [ord("x")] * 50


def test_other_decoders_are_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(BadInput, match="decoder WordPiece is not supported"):
        from_folder(tmp_path)


def test_an_unknown_kind_is_refused():
    with pytest.raises(BadInput, match="kind 'zip' is not known"):
        load_text(TokenizerSource("zip", Path("x"), {}))
