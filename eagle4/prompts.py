"""Prompt files: JSON lines in, `Prompt` records out. Every fault is named with its file and line."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle4 import dataset_prompts
from eagle4.errors import BadInput


class Prompt(NamedTuple):
    """One conversation to answer: feed turn k + 1 after the model's own answer to turn k."""

    id: str
    suite: str
    category: str
    turns: tuple[str, ...]


def load_prompts(
    paths: str | Path | Sequence[str | Path], limit: int | None = None, per_category: int | None = None
) -> list[Prompt]:
    """Prompts of one or several .jsonl or .jsonl.gz files, or data sets (`dataset:<name>[:<split>]`), in their order.

    Each line is an object with id (unique over all files), suite (or source, in training files), category
    and turns, a list of user messages; other fields are ignored. `per_category` keeps that many of each
    (suite, category). `limit` keeps that many in all, taken in rounds: the first prompt of every
    (suite, category) in order of first appearance, then the second of each, and so on. So a small limit still
    covers all, and a larger one only adds prompts. Raises `BadInput` with file and line.
    """
    for name, value in (("limit", limit), ("per_category", per_category)):
        if value is not None and value < 1:
            raise BadInput(f"{name} must be at least 1 (leave it out for all prompts), got {value}")
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise BadInput("no prompt file is named; give at least one .jsonl or .jsonl.gz file")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for file in map(str, files):
        for where, prompt in _read_any(file, limit):
            if prompt.id in seen:
                raise BadInput(f"{where}: id {prompt.id!r} is also at {seen[prompt.id]}; ids must be unique")
            seen[prompt.id] = where
            prompts.append(prompt)
    return _select(prompts, limit, per_category)


def _select(prompts: list[Prompt], limit: int | None, per_category: int | None) -> list[Prompt]:
    groups: dict[tuple[str, str], list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault((prompt.suite, prompt.category), []).append(i)
    rounds = itertools.zip_longest(*(group[:per_category] for group in groups.values()))
    taken = [i for one_each in rounds for i in one_each if i is not None]
    return [prompts[i] for i in sorted(taken[:limit])]


def _read_any(path: str, limit: int | None) -> Iterator[tuple[str, Prompt]]:
    if path.startswith(dataset_prompts.PREFIX):
        for name, suite, turns in dataset_prompts.rows(path, limit):
            yield name, Prompt(name, suite, suite, turns)
    else:
        yield from _read(Path(path))


def _read(file: Path) -> Iterator[tuple[str, Prompt]]:
    if not file.is_file():
        raise BadInput(f"no such prompt file: {file}; name an existing .jsonl or .jsonl.gz file")
    empty = True
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    empty = False
                    where = f"{file}:{number}"
                    yield where, _parse(where, line)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        remedy = "it must be UTF-8 JSON lines, gzipped if its name ends in .gz"
        raise BadInput(f"{file} cannot be read ({error}); {remedy}") from None
    if empty:
        raise BadInput(f"{file} holds no prompt; write one JSON object a line")


def _parse(where: str, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{where}: not JSON ({error.msg}, column {error.colno}); write one object a line"
        ) from None
    if not isinstance(record, dict):
        raise BadInput(f"{where}: expected a JSON object, got {type(record).__name__}")
    suite = "suite" if "suite" in record or "source" not in record else "source"
    prompt_id, suite, category = (_string(where, record, name) for name in ("id", suite, "category"))
    return Prompt(prompt_id, suite, category, _turns(where, record))


def _string(where: str, record: dict[str, Any], name: str) -> str:
    if name not in record:
        raise BadInput(f"{where}: field {name!r} is missing; add it")
    value = record[name]
    if not isinstance(value, str) or not value:
        raise BadInput(f"{where}: field {name!r} must be a non-empty string, got {value!r}")
    return value


def _turns(where: str, record: dict[str, Any]) -> tuple[str, ...]:
    if "turns" not in record:
        raise BadInput(f"{where}: field 'turns' is missing; add the list of user messages")
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{where}: field 'turns' must be a non-empty list of strings, got {turns!r}")
    for k, turn in enumerate(turns, start=1):
        if not isinstance(turn, str):
            raise BadInput(f"{where}: turn {k} must be a string, got {turn!r}")
        if not turn.strip():
            raise BadInput(f"{where}: turn {k} is empty; write the user's message")
        if any("\ud800" <= c <= "\udfff" for c in turn):
            raise BadInput(f"{where}: turn {k} holds half a surrogate pair, which is no character; remove it")
    return tuple(turns)
