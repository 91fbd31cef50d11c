"""A hand-made byte-level BPE, as folder and as GGUF metadata: ids 0–255 are bytes, merges follow."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from eagle4.text import TokenizerSource, load_text

# One printable character for each byte value, read off the library, not the code under test: below 192 it is
# the last one of that code point's UTF-8 bytes, from 192 on it is the Latin-1 character.
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
CHARS = [BYTES.pre_tokenize_str(chr(b))[0][0][-1] for b in range(192)] + [chr(b) for b in range(192, 256)]
MERGED = [b" t", b"he", b" the", b"12", b"123", b"\xf0\x9f", b"\xf0\x9f\x98", b"b;", b"ab;", b"ab;c"]
SPLIT = [(b" ", b"t"), (b"h", b"e"), (b" t", b"he"), (b"1", b"2"), (b"12", b"3"), (b"\xf0", b"\x9f")]
SPLIT += [(b"\xf0\x9f", b"\x98"), (b"b", b";"), (b"a", b"b;"), (b"ab;", b"c")]
SPECIALS = ["<|end|>", "<|start|>", "<|stop|>", "<think>"]
END, START, STOP, THINK = range(256 + len(MERGED), 256 + len(MERGED) + 4)
THE, HE = 258, 257

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|start|>system\nBe brief.<|end|>\n{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def shown(piece: bytes) -> str:
    return "".join(CHARS[b] for b in piece)


def gguf_metadata(**changes) -> dict:
    tokens = [*CHARS, *map(shown, MERGED), *SPECIALS]
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": [f"{shown(a)} {shown(b)}" for a, b in SPLIT],
        "token_type": [1] * (len(tokens) - 4) + [3, 3, 3, 4],
        "bos_token_id": START,
        "eos_token_id": END,
        "add_bos_token": False,
    }
    named = {f"tokenizer.ggml.{k}": v for k, v in {**metadata, **changes}.items() if v is not None}
    return {"tokenizer.chat_template": TEMPLATE, **named}


def from_gguf(**changes):
    return load_text(TokenizerSource("gguf", Path("tiny.gguf"), gguf_metadata(**changes)))


def write_folder(
    path: Path, config: dict | None = None, generation: dict | None = None, bos: bool = False
) -> Path:
    tokens = [*CHARS, *map(shown, MERGED), *SPECIALS]
    merges = [(shown(a), shown(b)) for a, b in SPLIT]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS[:3])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", START)]
        )
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>", "bos_token": "<|start|>"} | (config or {})
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(generation or {}))
    return path


def from_folder(path: Path):
    return load_text(TokenizerSource("folder", path, {}))


def metaspace(path: Path):
    tokens = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁▁", "ab"]
    merges = [("▁", "a"), ("▁", "▁"), ("a", "b")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, unk_token="<s>"
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return from_folder(path)
