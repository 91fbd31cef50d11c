"""Recordings: what a drafter would have guessed at every position of answers that the target gave anyway.

At temperature 0 the target's continuation does not depend on what is drafted, so one recording of the largest trees
judges every policy, depth and budget inside them (`eagle4.replay`). A folder holds `recording.json` (what it was made
of), and per group of prompts `answers_*.parquet` (a row a prompt) and `trees_*.parquet` (a row a prompt, variant and
position; lists by node). A group's answers are written last: groups without them are made again.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle4.errors import BadInput, require
from eagle4.files import write_atomic

FORMAT = "eagle4 recording 1"
ABOUT = "recording.json"
# What a node takes on disk before compression: token, parent, depth, score, match, probability.
NODE_BYTES = 4 + 2 + 1 + 4 + 1 + 4
NODE_FIELDS = {
    "tokens": (pa.int32(), np.int32),
    "parent": (pa.int16(), np.int16),
    "depth": (pa.int8(), np.int8),
    "score": (pa.float32(), np.float32),
    "match": (pa.bool_(), np.bool_),
    "prob": (pa.float32(), np.float32),
}


@dataclass(frozen=True)
class Variant:
    """How trees were grown: the head that scored candidates, frontier width, and children a node.

    `head`: own (the checkpoint's), full (the target's whole vocabulary), or r<rank>c<candidates> (retrieval).
    """

    head: str
    width: int
    children: int

    def __post_init__(self) -> None:
        require(self.width >= 1 and self.children >= 1, f"a shape needs width and children ≥ 1, got {self}")

    @property
    def name(self) -> str:
        return f"{self.head}_w{self.width}k{self.children}"

    def pool(self, depth: int) -> int:
        """Most nodes that a tree this deep can hold, root not counted."""
        return self.children + (depth - 1) * self.width * self.children


class Trees(NamedTuple):
    """One variant's trees of one answer: P positions, M nodes in creation order, parents before children.

    `parent` is a node, −1 the root; `score` the log path probability under the drafter, −inf where there is no node;
    `match` whether the path is what the target went on to say; `prob` the target's probability of the token after its
    parent at temperature 1 (or the run's, above 0), NaN where it was not computed.
    """

    tokens: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    score: np.ndarray
    match: np.ndarray
    prob: np.ndarray


class Recorded(NamedTuple):
    """One answer: its `length` tokens and `depth` more that the target would have gone on to say.

    Position i is a round whose root is answer token i; there are length − 1 of them. `entropy` [P]: of the target's
    distribution after the root, in nats.
    """

    prompt_id: str
    category: str
    prompt_length: int
    length: int
    tokens: np.ndarray
    entropy: np.ndarray
    trees: dict[str, Trees]


class About(NamedTuple):
    """What a recording was made of. `identity` tells target, drafter and sampling apart; `depth` bounds the trees."""

    identity: dict[str, Any]
    depth: int
    new_tokens: int
    variants: tuple[Variant, ...]
    command: str


def matches(tokens: np.ndarray, parent: np.ndarray, depth: np.ndarray, said: Sequence[int]) -> np.ndarray:
    """Which nodes [M] of a tree lie on the path `said` (the tokens that followed its root)."""
    found = np.zeros(len(tokens), bool)
    for m, (token, above, level) in enumerate(zip(tokens, parent, depth)):
        if 1 <= level <= len(said):
            found[m] = token == said[level - 1] and (above < 0 or found[above])
    return found


def start(folder: Path, about: About) -> set[str]:
    """Begin a recording or go on with it: ids of the prompts that are done. Raises BadInput for another one's
    folder."""
    path = folder / ABOUT
    content = {
        "format": FORMAT,
        "identity": about.identity,
        "depth": about.depth,
        "new_tokens": about.new_tokens,
        "variants": [asdict(v) for v in about.variants],
        "command": about.command,
    }
    if path.exists():
        there = read_about(folder)
        odd = [
            k
            for k in ("identity", "depth", "new_tokens", "variants")
            if getattr(there, k) != getattr(about, k)
        ]
        if odd:
            raise BadInput(
                f"{folder} holds a recording with another {', '.join(odd)}; choose another folder with output=…"
            )
        return {row["prompt_id"] for part in groups(folder) for row in _rows(part)}
    write_atomic(path, json.dumps(content, indent=1) + "\n")
    return set()


def groups(folder: Path) -> list[Path]:
    """Answer files of the groups that are complete, in order."""
    return sorted(folder.glob("answers_*.parquet"))


def write_group(folder: Path, answers: Sequence[Recorded]) -> None:
    """Add a group of answers; the file of its answers comes last, so that a group is there as a whole or not at all."""
    number = 1 + max((int(p.stem.rpartition("_")[2]) for p in groups(folder)), default=-1)
    rows: dict[str, list] = {"prompt_id": [], "variant": [], "position": [], **{f: [] for f in NODE_FIELDS}}
    for answer in answers:
        for name, trees in answer.trees.items():
            for position in range(len(trees.score)):
                real = np.isfinite(trees.score[position])
                rows["prompt_id"].append(answer.prompt_id)
                rows["variant"].append(name)
                rows["position"].append(position)
                for field in NODE_FIELDS:
                    rows[field].append(getattr(trees, field)[position][real])
    types = {field: pa.list_(kind) for field, (kind, _) in NODE_FIELDS.items()}
    schema = pa.schema({"prompt_id": pa.string(), "variant": pa.string(), "position": pa.int32(), **types})
    _write(folder / f"trees_{number:05d}.parquet", pa.table(rows, schema))
    columns = {field: [getattr(a, field) for a in answers] for field in Recorded._fields if field != "trees"}
    schema = pa.schema(
        {
            "prompt_id": pa.string(),
            "category": pa.string(),
            "prompt_length": pa.int32(),
            "length": pa.int32(),
            "tokens": pa.list_(pa.int32()),
            "entropy": pa.list_(pa.float32()),
        }
    )
    _write(folder / f"answers_{number:05d}.parquet", pa.table(columns, schema))


def read(folder: Path | str) -> tuple[About, list[Recorded]]:
    """A whole recording. Raises BadInput for a folder that holds none, and for damaged files."""
    folder = Path(folder)
    about = read_about(folder)
    pools = {v.name: v.pool(about.depth) for v in about.variants}
    answers = []
    for part in groups(folder):
        trees = _table(part.with_name(part.name.replace("answers", "trees")))
        names, ids = (np.array(trees.column(c).to_pylist()) for c in ("variant", "prompt_id"))
        flat = {field: _padded(trees.column(field), kind) for field, (_, kind) in NODE_FIELDS.items()}
        for row in _rows(part):
            own = ids == row["prompt_id"]
            found = {name: _trees(flat, own & (names == name), pools[name]) for name in pools}
            row["tokens"] = np.array(row["tokens"], np.int32)
            row["entropy"] = np.array(row["entropy"], np.float32)
            answers.append(Recorded(**row, trees=found))
    if not answers:
        raise BadInput(f"{folder} holds no recorded answer; run experiments.record with output={folder}")
    return about, answers


def read_about(folder: Path) -> About:
    path = folder / ABOUT
    if not path.is_file():
        raise BadInput(f"{folder} is not a recording: it has no {ABOUT}; make one with experiments.record")
    try:
        content = json.loads(path.read_text("utf-8"))
        if content.pop("format") != FORMAT:
            raise BadInput(f"{path} is not of format {FORMAT!r}; record it again with this version")
        content["variants"] = tuple(Variant(**v) for v in content["variants"])
        return About(**content)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path} is damaged ({error}); record it again") from error


def _trees(flat: dict[str, np.ndarray], own: np.ndarray, pool: int) -> Trees:
    """Rows of one answer and variant, `pool` nodes wide."""
    empty = {"parent": -1, "score": -np.inf, "prob": np.nan}
    cut = {}
    for field, values in flat.items():
        part = values[own]
        wide = np.full((len(part), pool), empty.get(field, 0), part.dtype)
        wide[:, : part.shape[1]] = part[:, :pool]
        cut[field] = wide
    real = np.isfinite(cut["score"])
    return Trees(**{f: np.where(real, v, v.dtype.type(empty.get(f, 0))) for f, v in cut.items()})


def _padded(column: pa.ChunkedArray, kind: Any) -> np.ndarray:
    """Lists of different length as one array; what is beyond a list is −inf or 0 (scores tell)."""
    values = column.combine_chunks()
    offsets, flat = values.offsets.to_numpy(), values.values.to_numpy(zero_copy_only=False)
    sizes = np.diff(offsets)
    wide = np.full((len(sizes), int(sizes.max(initial=0))), -np.inf if kind is np.float32 else 0, kind)
    wide[np.arange(wide.shape[1]) < sizes[:, None]] = flat[offsets[0] : offsets[-1]]
    return wide


def _rows(path: Path) -> list[dict[str, Any]]:
    return _table(path).to_pylist()


def _table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path, memory_map=False)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(
            f"{path} is cut or damaged ({str(error).splitlines()[0]}); remove it and record again"
        ) from error


def _write(path: Path, table: pa.Table) -> None:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_atomic(path, buffer.getvalue())
