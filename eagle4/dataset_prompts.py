"""Prompts from a public data set by name, through the `datasets` library, which is asked for only here.

Which column holds the user's words differs from set to set: lists of messages (`messages`, `conversations`, with role
or from, content or value) give their user turns, and `turns`, `prompt`, `instruction` or `question` give theirs.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from eagle4.errors import BadInput

PREFIX = "dataset:"
MESSAGES = ("messages", "conversations", "conversation")
TEXTS = ("turns", "prompt", "instruction", "question")
USERS = ("user", "human")


def rows(path: str, limit: int | None) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(id, suite, user turns) of `dataset:<name>[:<split>]`, streamed in its order; rows without a user turn are
    skipped. Raises BadInput if the library is missing, the set can't be had, or no known column is in it."""
    name, _, split = path.removeprefix(PREFIX).partition(":")
    if not name:
        raise BadInput(f"{path!r} names no data set; write {PREFIX}<name> or {PREFIX}<name>:<split>")
    for number, row in enumerate(itertools.islice(_stream(name, split or "train"), limit)):
        turns = user_turns(row)
        if turns is None:
            known, there = ", ".join((*MESSAGES, *TEXTS)), ", ".join(row)
            raise BadInput(
                f"data set {name!r} has none of the columns {known} (it has {there}); write its prompts to a .jsonl "
                "file"
            )
        if turns:
            yield f"{name}/{number}", name, turns


def _stream(name: str, split: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(f"data set {name!r} needs the package datasets; run pip install datasets") from error
    try:
        return iter(datasets.load_dataset(name, split=split, streaming=True))
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"data set {name!r}, split {split!r}, can't be had ({line}); check name and network"
        ) from error


def user_turns(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The user's messages of a row, empty ones left out; None if no column is known."""
    for column in MESSAGES:
        if isinstance(row.get(column), list):
            said = [m for m in row[column] if (m.get("role") or m.get("from")) in USERS]
            return _texts(m.get("content") or m.get("value") for m in said)
    for column in TEXTS:
        if column in row:
            value = row[column]
            return _texts(value if isinstance(value, list) else [value])
    return None


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(v for v in values if isinstance(v, str) and v.strip())
