"""Fills the feature store: documents from stored responses, through the target once.

Documents of like length share a padded batch. On a CPU this beats rows packed from several documents, whose attention
pays for pairs of tokens that never see each other; batches of about 2,000 tokens are no slower than larger ones.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Bool, Int32

from eagle4 import text
from eagle4.errors import BadInput
from eagle4.prompts import Prompt
from eagle4.specs import ModelSpec
from eagle4.target import model as target
from eagle4.text import Text
from eagle4.train import features
from eagle4.train.features import Document, Fingerprint
from eagle4.train.responses import Response

BATCH_TOKENS = 2048
MARGIN_BYTES = 10**9
_MARK = "⟦answer⟧"

Chunk = Callable[..., tuple[Array, Array]]


class Turn(NamedTuple):
    """A document before capture: one conversation turn. `supervised` marks the answer's tokens."""

    name: str
    tokens: Int32[np.ndarray, " n"]
    supervised: Bool[np.ndarray, " n"]


class Counts(NamedTuple):
    """Responses that did not come through whole: cropped ones, and ones that gave no document."""

    cropped: int
    without_prompt: int
    repeated: int
    without_answer: int


# ---- documents


def documents(
    words: Text, responses: Iterable[Response], prompts: Iterable[Prompt], max_length: int
) -> tuple[list[Turn], Counts]:
    """Chat template (user turn) + answer of every response whose prompt is known, each document once.

    They are cropped at `max_length`; one that has no answer left is dropped, since its loss mask would be empty. The
    order is drawn from the names, so the first part of a store is a random sample. Raises BadInput if none remains.
    """
    _require_answer_place(words)
    turns = {prompt.id: prompt.turns[0] for prompt in prompts}
    found: dict[bytes, Turn] = {}
    names: set[str] = set()
    total = cropped = without_prompt = repeated = without_answer = 0
    for response in responses:
        total += 1
        if not response.written and response.prompt_id not in turns:
            without_prompt += 1
            continue
        asked = (
            text.decode(words, response.written).strip() if response.written else turns[response.prompt_id]
        )
        opening = text.encode_chat(words, [{"role": "user", "content": asked}])
        ids = np.array([*opening, *response.answer], np.int32)[:max_length]
        turn = Turn(response.prompt_id, ids, np.arange(len(ids)) >= len(opening))
        if not turn.supervised.any():
            without_answer += 1
        elif turn.name in names or ids.tobytes() in found:
            repeated += 1
        else:
            cropped += len(opening) + len(response.answer) > max_length
            names.add(turn.name)
            found[ids.tobytes()] = turn
    counts = Counts(cropped, without_prompt, repeated, without_answer)
    if not found:
        raise _none_left(total, counts, max_length)
    return sorted(found.values(), key=lambda turn: features.chance(turn.name, "order")), counts


def _none_left(total: int, counts: Counts, max_length: int) -> BadInput:
    if counts.without_prompt == total:
        return BadInput(
            f"none of the {total} responses answers a given prompt; name the file of their prompts: data.path=…"
        )
    return BadInput(
        f"the loss mask is empty: no document has an answer within max_length={max_length}; raise max_length"
    )


def _require_answer_place(words: Text) -> None:
    """Raises BadInput if the template doesn't say where an answer stands after a user's turn."""
    user = {"role": "user", "content": "?"}
    whole = text.render_chat(words, [user, {"role": "assistant", "content": _MARK}], False)
    before, shown, _ = whole.partition(_MARK)
    bare = text.render_chat(words, [user], False)
    opened = text.render_chat(words, [user]) != bare
    # Some templates need no opening: the answer follows the user's turn directly.
    if not shown or not (opened or before.strip() == bare.strip()):
        raise BadInput(
            f"the chat template of {words.name} has no place for the assistant's answer (no generation prompt); "
            "use an instruct model's template"
        )


class Room(NamedTuple):
    """What a capture needs, and what the disk has."""

    bytes_per_token: int
    bytes: int
    free_bytes: int


def room(folder: Path, mark: Fingerprint, tokens: int) -> Room:
    """Disk space for so many tokens. Raises BadInput where it would leave less than 1 GB free."""
    each = (len(mark.taps) + 1) * mark.width * 2 + 4 + 1
    here = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    found = Room(each, each * tokens, shutil.disk_usage(here).free)
    if found.bytes + MARGIN_BYTES > found.free_bytes:
        raise BadInput(
            f"{folder}: features of {tokens} tokens take {found.bytes / 1e9:.2f} GB and 1 GB must stay free, but the "
            f"disk has {found.free_bytes / 1e9:.2f} GB; free some, capture fewer documents, or use fewer taps"
        )
    return found


# ---- the target's pass


def require_taps(taps: Sequence[Any], num_layers: int) -> tuple[int, ...]:
    """`taps` if each is a different `hidden_states` index of the model, else BadInput."""
    if not taps or len(set(taps)) < len(taps):
        raise BadInput(f"taps must be different hidden_states indices, at least one, got {list(taps)}")
    for tap in taps:
        if type(tap) is not int or not 0 <= tap <= num_layers:
            raise BadInput(f"tap {tap!r} is not a hidden_states index of the model; they are 0..{num_layers}")
    return tuple(taps)


def chunk(
    params: dict[str, Any], spec: ModelSpec, taps: tuple[int, ...], tokens: Int32[Array, "B T"]
) -> tuple[BFloat16[Array, "B T A D"], BFloat16[Array, "B T D"]]:
    """Features and hidden states of right-padded rows. Padding comes last, so no real token sees it."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    out = target.forward(params, spec, tokens, positions, causal, taps=taps)
    return out.features.astype(jnp.bfloat16), out.hidden.astype(jnp.bfloat16)


def width(length: int) -> int:
    """Row width for a length: the next multiple of 32, in steps of 1/16 beyond 512, so that few are compiled."""
    step = max(32, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def batches(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Turns of like length together, longest first; only the last batch may have rows to spare."""
    left = sorted(turns, key=lambda turn: -len(turn.tokens))
    while left:
        rows = rows_of(width(len(left[0].tokens)))
        yield left[:rows]
        left = left[rows:]


def rows_of(row_width: int) -> int:
    """Rows in a batch of this width."""
    return max(1, BATCH_TOKENS // row_width)


def run(
    compiled: Chunk, params: dict[str, Any], spec: ModelSpec, taps: tuple[int, ...], turns: Sequence[Turn]
) -> list[Document]:
    """One batch through the target. `compiled` is `chunk` under jit; its shapes depend on the longest turn only."""
    T = width(max(len(turn.tokens) for turn in turns))
    tokens = np.zeros((rows_of(T), T), np.int32)
    for row, turn in zip(tokens, turns):
        row[: len(turn.tokens)] = turn.tokens
    tapped, hidden = (np.asarray(a) for a in compiled(params, spec, taps, tokens))
    lengths = [len(turn.tokens) for turn in turns]
    return [Document(*turn, tapped[i, :n], hidden[i, :n]) for i, (turn, n) in enumerate(zip(turns, lengths))]


def windows(turns: Iterable[Turn], shard_tokens: int) -> Iterator[list[Turn]]:
    """Consecutive turns of about `shard_tokens` tokens: one shard each."""
    window: list[Turn] = []
    for turn in turns:
        window.append(turn)
        if sum(len(t.tokens) for t in window) >= shard_tokens:
            yield window
            window = []
    if window:
        yield window


def capture(
    folder: Path,
    compiled: Chunk,
    params: dict[str, Any],
    spec: ModelSpec,
    taps: tuple[int, ...],
    turns: Iterable[Turn],
    shard_tokens: int,
    told: Callable[[int], None],
) -> list[str]:
    """Append the features of all turns to a store that `features.start` began. `told` hears tokens as they are done.

    Returns the names of documents left out for a feature that is infinite or no number.
    """
    left_out: list[str] = []
    for window in windows(turns, shard_tokens):
        done: list[Document] = []
        try:
            for group in batches(window):
                done += run(compiled, params, spec, taps, group)
                told(sum(len(turn.tokens) for turn in group))
        finally:  # an interrupt keeps what is computed
            left_out += features.append(folder, done)
    return left_out
