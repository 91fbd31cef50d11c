"""Builds tokenizer, chat template and stop ids from a checkpoint folder or a GGUF file."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from eagle4.errors import BadInput


class TokenizerSource(NamedTuple):
    """Where a tokenizer comes from.

    kind `folder`: `path` is a checkpoint folder with tokenizer.json beside its configs, `metadata` is empty.
    kind `gguf`: `path` is the file (named in errors only), `metadata` its `tokenizer.*` keys as plain values.
    """

    kind: str
    path: Path
    metadata: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Text:
    """Everything between strings and ids. `pieces[i]` are the bytes of token i; special tokens have none.

    `bos_id` is what `encode` puts first, or None. `strips_space`: the tokenizer writes a space before the
    first word, which decoding takes away again (SentencePiece, arXiv 1808.06226). `variables` are the special
    tokens by the names that chat templates use (`bos_token`, `eos_token`, …).
    """

    name: str
    tokenizer: Tokenizer = field(repr=False)
    template: str | None = field(repr=False)
    stop_ids: tuple[int, ...]
    bos_id: int | None
    pieces: tuple[bytes, ...] = field(repr=False)
    strips_space: bool
    variables: Mapping[str, str]


def load_text(source: TokenizerSource) -> Text:
    """Tokenizer, template and stop ids of a checkpoint folder or of a GGUF file's metadata.

    Stop ids are those of the generation config (or config.json) and the tokenizer's end token; in a GGUF file
    its eos, eot and eom ids. Raises `BadInput` for what is missing, damaged or not supported.
    """
    if source.kind == "folder":
        return _from_folder(Path(source.path))
    if source.kind == "gguf":
        return _from_gguf(Path(source.path), source.metadata)
    raise BadInput(f"tokenizer source kind {source.kind!r} is not known; use folder or gguf")


def _assemble(
    path: Path,
    tokenizer: Tokenizer,
    template: str | None,
    stop_ids: Sequence[int],
    bos_id: int | None,
    variables: Mapping[str, str],
) -> Text:
    if not stop_ids:
        raise BadInput(
            f"{path}: no stop id; add eos_token_id to generation_config.json (or to the GGUF metadata)"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    stops = tuple(dict.fromkeys(stop_ids))
    pieces, strips_space = _pieces(path, tokenizer, stops)
    return Text(path.resolve().name, tokenizer, template, stops, bos_id, pieces, strips_space, variables)


# ---- checkpoint folders


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path} must hold a JSON object; fetch the file again")
    return content


def _from_folder(path: Path) -> Text:
    file = path / "tokenizer.json"
    if not file.exists():
        raise BadInput(f"{path}: no tokenizer.json; save the model's fast tokenizer there (save_pretrained)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"{file} cannot be read ({error}); fetch the file again") from None
    config = _read_json(path / "tokenizer_config.json")
    variables = _special_names(_read_json(path / "special_tokens_map.json")) | _special_names(config)
    template = _named_template(path, config.get("chat_template"))
    if (path / "chat_template.jinja").exists():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")

    eos = _read_json(path / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(path / "config.json").get("eos_token_id")
    stop_ids = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    if "eos_token" in variables:
        stop_ids.append(_token_id(path, tokenizer, variables["eos_token"]))
    bos_id = _folder_bos(path, tokenizer, config.get("add_bos_token"), variables.get("bos_token"))
    return _assemble(path, tokenizer, template, stop_ids, bos_id, variables)


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[name] = value
    return names


def _named_template(path: Path, value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    templates = {entry["name"]: entry["template"] for entry in value}
    if "default" not in templates:
        raise BadInput(f"{path}: chat templates are {', '.join(templates)}; name one of them default")
    return templates["default"]


def _token_id(path: Path, tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise BadInput(f"{path}: special token {token!r} is not in tokenizer.json; fetch the folder again")
    return token_id


def _folder_bos(path: Path, tokenizer: Tokenizer, flag: Any, token: str | None) -> int | None:
    """The explicit flag wins; without one, what the tokenizer's post-processing puts before an empty text."""
    if token is None:
        return None
    bos_id = _token_id(path, tokenizer, token)
    adds = flag if isinstance(flag, bool) else tokenizer.encode("").ids[:1] == [bos_id]
    return bos_id if adds else None


# ---- GGUF metadata

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Successive splits before the merges, by the name in tokenizer.ggml.pre; `default` is what the format's own
# runtime applies to a file that names none.
_SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "qwen2": (rf"{_WORDS}|\p{{N}}|{_MARKS}",),
    "llama-bpe": (rf"{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_CONTROL, _USER_DEFINED = 3, 4


def _from_gguf(path: Path, metadata: Mapping[str, Any]) -> Text:
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    remedy = "load the checkpoint folder with its tokenizer.json instead"
    if model != "gpt2":
        raise BadInput(f"{path}: tokenizer kind {model!r} is not supported (gpt2 is); {remedy}")
    if pre not in _SPLITS:
        raise BadInput(f"{path}: pre-tokenizer {pre!r} is not supported ({', '.join(_SPLITS)} are); {remedy}")
    for key in ("tokens", "merges"):
        if not metadata.get(f"tokenizer.ggml.{key}"):
            raise BadInput(f"{path}: the file holds no tokenizer.ggml.{key}; {remedy}")
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise BadInput(
                    f"{path}: {name}_token_id {token_id} is not among its {len(tokens)} tokens; {remedy}"
                )
            ids[name] = int(token_id)
    short = {"unknown": "unk", "padding": "pad"}
    variables = {f"{short.get(name, name)}_token": tokens[token_id] for name, token_id in ids.items()}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    bos_id = ids.get("bos") if adds_bos else None
    stop_ids = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    template = metadata.get("tokenizer.chat_template")
    return _assemble(path, _byte_level_bpe(path, pre, metadata), template, stop_ids, bos_id, variables)


def _byte_level_bpe(path: Path, pre: str, metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong:
        raise BadInput(f"{path}: merge {' '.join(wrong)!r} is damaged; fetch the file again")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception
        raise BadInput(f"{path}: tokenizer metadata is damaged ({error}); fetch the file again") from None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # The stubs type these properties as read-only.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_text])  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, its in zip(tokens, kinds) if its == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
    return tokenizer


# ---- bytes of tokens


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 is itself, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _pieces(path: Path, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[tuple[bytes, ...], bool]:
    parts = _decoder_parts(tokenizer.decoder)
    kinds = {part["type"] for part in parts}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"ByteFallback", "Metaspace"}:
        raise BadInput(
            f"{path}: decoder {', '.join(kinds)} is not supported; use a byte-level or SentencePiece BPE"
        )
    strips_space = any(
        (part["type"] == "Strip" and part["start"] > 0)
        or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in added:
            pieces[i] = b"" if added[i].special else added[i].content.encode()
        else:
            pieces[i] = _bytes_of_byte_level(token) if byte_level else _bytes_of_metaspace(token)
    for i in stop_ids:
        if i < len(pieces):
            pieces[i] = b""
    return tuple(pieces), strips_space


def _bytes_of_byte_level(token: str) -> bytes:
    table = _byte_of_char()
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


def _bytes_of_metaspace(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
