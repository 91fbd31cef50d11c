"""Host-side text: encode, decode, chat templates, streaming, stop strings, padding.

Text is defined by bytes: each token stands for a fixed byte string (none for special tokens), and the text of
a token sequence is the UTF-8 reading of their concatenation. So streamed pieces, stop strings and `decode`
always agree.
"""

import codecs
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jaxtyping import Int32

from eagle4.errors import BadInput
from eagle4.tokenizer import Text, TokenizerSource, load_text

__all__ = [
    "Detokenizer",
    "Text",
    "TokenizerSource",
    "decode",
    "encode",
    "encode_chat",
    "find_stop",
    "load_text",
    "pad",
    "render_chat",
    "stream",
]


def encode(text: Text, string: str) -> list[int]:
    """Ids of plain text, led by the BOS id where the model's tokenizer adds one.

    Special tokens written out in the string become their ids.
    """
    ids = text.tokenizer.encode(string, add_special_tokens=False).ids
    return ids if text.bos_id is None or ids[:1] == [text.bos_id] else [text.bos_id, *ids]


def decode(text: Text, ids: Sequence[int]) -> str:
    """The text of ids, without special tokens and stop ids; bytes that are not UTF-8 become U+FFFD."""
    return _strip(text, b"".join(_token_bytes(text, ids))).decode("utf-8", "replace")


def _token_bytes(text: Text, ids: Sequence[int]) -> list[bytes]:
    """Ids beyond the tokenizer (a padded embedding table) have no text; a negative id is the caller's bug."""
    if any(i < 0 for i in ids):
        raise IndexError(f"negative token id in {list(ids)}")
    return [text.pieces[i] if i < len(text.pieces) else b"" for i in ids]


def _strip(text: Text, content: bytes) -> bytes:
    return content[1:] if text.strips_space and content[:1] == b" " else content


# ---- chat templates


class _Generation(jinja2.ext.Extension):
    """Reads `{% generation %}…{% endgeneration %}`, which marks answers for training, as its content."""

    tags = {"generation"}  # noqa: RUF012 (the class attribute is jinja2's interface)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter escapes <, > and & for HTML, which templates do not expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def render_chat(
    text: Text, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The conversation as the model's own template writes it; messages are {"role": …, "content": …}.

    The template decides everything, a default system prompt included. `variables` reach the template as given
    (for instance enable_thinking=False). Raises `BadInput` without a template or when the template refuses.
    """
    if text.template is None:
        raise BadInput(f"{text.name} has no chat template; use an instruct model, or plain prompts")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise BadInput(f"chat message {dict(message)!r} needs a role and a content, both strings")
    try:
        return _compiled(text.template).render(
            {"tools": None, "documents": None, **text.variables, **variables},
            messages=messages,
            add_generation_prompt=add_generation_prompt,
        )
    except jinja2.TemplateError as error:
        raise BadInput(f"the chat template of {text.name} refuses these messages: {error}") from None


def encode_chat(
    text: Text, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True, **variables: Any
) -> list[int]:
    """Ids of `render_chat`. BOS comes from the template alone, so it is never doubled."""
    rendered = render_chat(text, messages, add_generation_prompt, **variables)
    return text.tokenizer.encode(rendered, add_special_tokens=False).ids


# ---- streaming and stop strings


class Detokenizer(NamedTuple):
    """Streaming state: the bytes of a character that is not complete yet, and whether any byte has come."""

    pending: bytes = b""
    started: bool = False


def stream(
    text: Text, state: Detokenizer, ids: Sequence[int], final: bool = False
) -> tuple[str, Detokenizer]:
    """The text that `ids` add, and the next state; start from `Detokenizer()`.

    Pass `final` with the last ids (or with none): then the pieces concatenate to `decode` of all ids. A
    character split over tokens comes out with its last byte; U+FFFD only stands for bytes that can no longer
    become UTF-8.
    """
    new = b"".join(_token_bytes(text, ids))
    content = state.pending + (new if state.started else _strip(text, new))
    string, used = codecs.utf_8_decode(content, "replace", final)
    return string, Detokenizer(content[used:], state.started or bool(new))


def find_stop(text: Text, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str, str | None]:
    """Where an answer ends: (number of ids kept, answer text, the stop string found or None).

    The stop string that is completed first wins, the longer one on a tie, so the result is the same however
    the answer was cut into blocks. Kept ids include the token that completes it; the text ends before it.
    Special tokens have no text: stop at them by id.
    """
    if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadInput(f"stop strings must be a list of non-empty strings, got {stops!r}")
    pieces = _token_bytes(text, ids)
    whole = b"".join(pieces)
    content = _strip(text, whole)
    found = []
    for stop in stops:
        start = content.find(stop.encode())
        if start >= 0:
            found.append((start + len(stop.encode()), start, stop))
    if not found:
        return len(ids), content.decode("utf-8", "replace"), None
    end, start, stop = min(found)
    ends = np.cumsum([len(piece) for piece in pieces])
    kept = int(np.searchsorted(ends, end + len(whole) - len(content))) + 1
    return kept, content[:start].decode("utf-8", "replace"), stop


# ---- padding


def pad(
    prompts: Sequence[Sequence[int]], multiple: int = 64
) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, " B"]]:
    """Prompts as one right-padded array (padding id 0), and their lengths.

    T is the longest one rounded up to a multiple, so that few widths are compiled. Raises `BadInput` for an
    empty prompt.
    """
    if not prompts:
        raise BadInput("there are no prompts; give at least one")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise BadInput(f"prompt {i} is empty; give it at least one token")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-int(lengths.max()) // multiple) * multiple
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    return tokens, lengths
