"""Laws of host-side text: chat templates, streaming, stop strings, padding."""

import random

import numpy as np
import pytest
from tiny_tokenizer import END, START, THINK, from_folder, from_gguf, metaspace, write_folder

from eagle4.errors import BadInput
from eagle4.text import Detokenizer, decode, encode, encode_chat, find_stop, pad, render_chat, stream


@pytest.fixture(scope="module")
def tiny():
    return from_gguf()


# ---- chat


def test_template_is_followed_to_the_letter(tiny):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    head = "<|start|>system\nBe brief.<|end|>\n<|start|>user\na<|end|>\n"
    assert render_chat(tiny, messages[:1]) == head + "<|start|>assistant\n"
    assert render_chat(tiny, messages, add_generation_prompt=False) == head + "<|start|>assistant\nb<|end|>\n"
    ids = encode_chat(tiny, messages[:1])
    assert [i for i in ids if i >= END] == [START, END, START, END, START]
    assert ids[-10:] == list(b"assistant\n")


def test_second_turn_continues_the_ids_served_at_the_first(tiny):
    asked = [{"role": "user", "content": "the ab;c?"}]
    served = encode_chat(tiny, asked)
    answer = "the 12 😀"
    followed = [*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "he"}]
    again = encode_chat(tiny, followed)
    spoken = [*served, *encode(tiny, answer), tiny.stop_ids[0]]
    assert again[: len(spoken)] == spoken
    assert again[len(spoken) :] == encode(tiny, "\n<|start|>user\nhe<|end|>\n<|start|>assistant\n")


def templated(tmp_path, template):
    return from_folder(write_folder(tmp_path, {"chat_template": template}))


def test_templates_may_use_what_their_authors_use(tmp_path):
    template = (
        "{%- for message in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ eos_token }}{{ strftime_now('%%') }}{{ tools is none }}{{ mood }}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    text = templated(tmp_path, template)
    assert render_chat(text, messages, mood="ok") == '{"role": "user", "content": "<é>"}<|end|>%Trueok'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "refuses"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|refuses"),
    ],
)
def test_templates_that_refuse_are_bad_input(tmp_path, template, message):
    with pytest.raises(BadInput, match=message):
        render_chat(templated(tmp_path, template), [{"role": "user", "content": "x"}])


def test_which_template_counts(tmp_path):
    user = [{"role": "user", "content": "x"}]
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    assert render_chat(templated(tmp_path, named), user) == "d"
    with pytest.raises(BadInput, match="chat templates are tools"):
        templated(tmp_path, named[:1])
    with pytest.raises(BadInput, match="no chat template; use an instruct model"):
        render_chat(templated(tmp_path, None), user)
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render_chat(from_folder(tmp_path), user) == "file"


def test_messages_need_role_and_content(tiny):
    for message in ({"role": "user"}, {"content": "x"}, {"role": "user", "content": None}):
        with pytest.raises(BadInput, match="role and a content"):
            render_chat(tiny, [message])


# ---- streaming


def stream_all(text, ids, rng):
    state, pieces, at = Detokenizer(), [], 0
    while at < len(ids):
        step = rng.randint(1, 3)
        piece, state = stream(text, state, ids[at : at + step])
        pieces.append(piece)
        at += step
    pieces.append(stream(text, state, [], final=True)[0])
    return pieces


def test_streamed_pieces_concatenate_to_decode(tiny):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(THINK + 3) for _ in range(rng.randrange(30))]
        expected = tiny.tokenizer.decode([i for i in ids if i <= THINK], skip_special_tokens=True)
        assert decode(tiny, ids) == expected
        assert "".join(stream_all(tiny, ids, rng)) == expected


def test_a_character_split_over_tokens_comes_out_whole(tiny):
    state, pieces = Detokenizer(), []
    for i in [ord(" "), *" 😀é".encode(), END]:
        piece, state = stream(tiny, state, [i])
        pieces.append(piece)
    assert pieces == [" ", " ", "", "", "", "😀", "", "é", ""]
    half, held = stream(tiny, Detokenizer(), [262])
    assert half == ""
    assert stream(tiny, held, [0x80]) == ("😀", Detokenizer(b"", True))
    assert stream(tiny, held, [0x83])[0] == "😃"
    assert stream(tiny, held, [], final=True)[0] == "\ufffd"


def test_no_streamed_text_holds_a_replacement_when_the_whole_does_not(tiny):
    rng = random.Random(1)
    for _ in range(100):
        string = "".join(rng.choice("aé日😀👩 the;") for _ in range(rng.randrange(12)))
        pieces = stream_all(tiny, encode(tiny, string), rng)
        assert "".join(pieces) == string
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_and_padding_ids_have_no_text_and_negative_ids_are_refused(tiny):
    assert decode(tiny, [START, ord("x"), END, THINK + 1, 10**6]) == "x"
    with pytest.raises(IndexError):
        decode(tiny, [5, -1])


def test_sentencepiece_like_tokenizers_lose_only_the_space_they_added(tmp_path):
    text = metaspace(tmp_path)
    rng = random.Random(2)
    for string in ("a b", " a  ab", "  ", "😀 é\n", "", "ab"):
        ids = encode(text, string)
        assert decode(text, ids) == text.tokenizer.decode(ids) == string
        assert "".join(stream_all(text, ids, rng)) == string
        assert "".join(stream_all(text, [0, *ids, 1], rng)) == string
    _, state = stream(text, Detokenizer(), [0])
    assert stream(text, state, [261]) == ("a", Detokenizer(b"", True))
    ids = encode(text, "a ab")
    assert ids == [261, 261, 260]
    assert find_stop(text, ids, ["a a"]) == (2, "", "a a")
    assert find_stop(text, encode(text, "😀a"), ["😀"])[:2] == (5, "")


# ---- stop strings

E_ACUTE = list("é".encode())


@pytest.mark.parametrize(
    ("ids", "stops", "result"),
    [
        ([ord("x"), 265, ord("y")], [";"], (2, "xab", ";")),  # completed in the middle of the token "ab;c"
        ([ord("x"), 265, ord("y")], ["cy"], (3, "xab;", "cy")),  # spans two tokens
        ([258, 258, 258], [" the"], (1, "", " the")),  # the first of several
        ([ord("a"), *E_ACUTE, ord("b")], ["é"], (3, "a", "é")),  # complete with the character's last byte
        ([262, 0x80, ord("b")], ["😀"], (2, "", "😀")),
        ([262, 0x80, ord("b")], ["b"], (3, "😀", "b")),
        ([262, ord("b")], ["b"], (2, "\ufffd", "b")),
        (list(b"xabcd"), ["abcd", "bc"], (4, "xa", "bc")),  # completed first wins
        (list(b"xabc"), ["bc", "abc", "c"], (4, "x", "abc")),  # longest on a tie
        ([ord("a"), START, ord("b"), END], ["ab"], (3, "", "ab")),  # specials have no text
        ([ord("a"), END, END], ["a"], (1, "", "a")),
        (list(b"xy"), ["z"], (2, "xy", None)),
        (list(b"xy"), [], (2, "xy", None)),
        ([], ["z"], (0, "", None)),
    ],
)
def test_stop_strings(tiny, ids, stops, result):
    assert find_stop(tiny, ids, stops) == result


def test_stop_strings_agree_with_reading_one_character_after_another(tiny):
    rng = random.Random(3)
    ids_of = [ord("a"), ord("b"), ord(";"), ord("c"), 263, 264, 265, END, 261, 262, 0x80]
    stops_of = ["a", "b;", ";c", "bab", "ab;ca", "cc", "😀", ";"]
    for _ in range(400):
        ids = [rng.choice(ids_of) for _ in range(rng.randrange(9))]
        stops = rng.sample(stops_of, rng.randint(1, 3))
        whole = decode(tiny, ids)
        kept, answer, which = len(ids), whole, None
        for n in range(len(whole) + 1):
            done = [stop for stop in stops if whole[:n].endswith(stop)]
            if done:
                which = max(done, key=len)
                answer = whole[: n - len(which)]
                kept = next(k for k in range(len(ids) + 1) if whole[:n] in decode(tiny, ids[:k]))
                break
        assert find_stop(tiny, ids, stops) == (kept, answer, which)
        # However the answer is cut into blocks, the one that completes the stop string gives the same result.
        if which is not None:
            assert find_stop(tiny, ids[:kept], stops) == (kept, answer, which)
            assert find_stop(tiny, ids[: kept - 1], stops)[2] is None


@pytest.mark.parametrize("stops", ["stop", [""], [3]])
def test_stop_strings_are_a_list_of_strings(tiny, stops):
    with pytest.raises(BadInput, match="stop strings must be a list"):
        find_stop(tiny, [1], stops)


# ---- padding


def test_pad():
    tokens, lengths = pad([[5, 6, 7], [8]], multiple=4)
    np.testing.assert_array_equal(tokens, [[5, 6, 7, 0], [8, 0, 0, 0]])
    np.testing.assert_array_equal(lengths, [3, 1])
    assert tokens.dtype == lengths.dtype == np.int32
    assert [pad([[1] * n])[0].shape[1] for n in (1, 64, 65)] == [64, 64, 128]
    with pytest.raises(BadInput, match="prompt 1 is empty"):
        pad([[1], []])
    with pytest.raises(BadInput, match="no prompts"):
        pad([])
