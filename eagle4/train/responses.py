"""Generated tokens on disk: the dearest part of training data, so nobody generates them twice.

A folder of shards `responses_00000.npz`. Answers to given prompts are kept by prompt id, without the prompt's text;
user turns that the model wrote itself are kept whole. Tokens are uint16 where the vocabulary allows.
"""

import io
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle4.errors import BadInput
from eagle4.files import write_atomic

_SHARD = re.compile(r"responses_(\d{5})\.npz")


class Response(NamedTuple):
    """One answer of the target. `written` holds the ids of a user turn that the model wrote, else it is empty.

    `finished` says that the answer ended by itself, not at the length limit.
    """

    prompt_id: str
    written: list[int]
    answer: list[int]
    temperature: float
    finished: bool


def shards(folder: Path) -> list[Path]:
    """The folder's shards in the order in which they were written."""
    return sorted(p for p in folder.glob("responses_*.npz") if _SHARD.fullmatch(p.name))


def claim(folder: Path, model: str) -> None:
    """Make the folder this model's. Raises BadInput if another model's answers are in it: ids would mean other text."""
    note = folder / "model.txt"
    owner = note.read_text(encoding="utf-8").strip() if note.exists() else model
    if owner != model:
        raise BadInput(f"{folder} holds answers of {owner}; choose another store for {model}")
    write_atomic(note, model + "\n")


def append_shard(folder: Path, responses: Iterable[Response]) -> Path:
    """Write one more shard, atomically. Returns its path."""
    rows = list(responses)
    largest = max((t for r in rows for t in (*r.written, *r.answer)), default=0)
    kind = np.uint16 if largest < 1 << 16 else np.uint32
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        prompt_id=np.array([r.prompt_id for r in rows]),
        written_length=np.array([len(r.written) for r in rows], np.int32),
        answer_length=np.array([len(r.answer) for r in rows], np.int32),
        written=np.array([t for r in rows for t in r.written], kind),
        answer=np.array([t for r in rows for t in r.answer], kind),
        temperature=np.array([r.temperature for r in rows], np.float32),
        finished=np.array([r.finished for r in rows]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    taken = [int(p.stem.split("_")[1]) for p in shards(folder)]
    path = folder / f"responses_{max(taken, default=-1) + 1:05d}.npz"
    write_atomic(path, buffer.getvalue())
    return path


def read_responses(folder: Path) -> Iterator[Response]:
    """Every stored response, shard by shard. Raises BadInput naming a shard that cannot be read."""
    for path in shards(folder):
        try:
            with np.load(io.BytesIO(path.read_bytes())) as data:
                columns = {name: data[name] for name in data.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise BadInput(
                f"{path} is damaged ({error}); remove it and generate its responses again"
            ) from None
        written = np.split(columns["written"], np.cumsum(columns["written_length"])[:-1])
        answers = np.split(columns["answer"], np.cumsum(columns["answer_length"])[:-1])
        for i, name in enumerate(columns["prompt_id"]):
            yield Response(
                str(name),
                written[i].tolist(),
                answers[i].tolist(),
                float(columns["temperature"][i]),
                bool(columns["finished"][i]),
            )


class Counts(NamedTuple):
    """Size of a store."""

    responses: int
    tokens: int
    bytes: int


def count(folder: Path) -> Counts:
    """Responses, answer tokens and bytes on disk."""
    rows = tokens = 0
    for response in read_responses(folder):
        rows += 1
        tokens += len(response.answer)
    return Counts(rows, tokens, sum(p.stat().st_size for p in shards(folder)))
