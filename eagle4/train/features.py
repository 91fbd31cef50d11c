"""The feature store: what the target computed for each training document, captured once for all drafters.

A folder with `index.json` and shards of plain .npy files. Features and hidden states are bfloat16 (kept as uint16,
which .npy knows) and stay on disk, memory-mapped. The index is written last, so a shard that it lists is whole.
"""

import dataclasses
import errno
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Bool, Int32, Int64, UInt16

from eagle4.errors import BadInput
from eagle4.files import plain, write_atomic
from eagle4.fingerprint import weights_digest
from eagle4.specs import ModelSpec

LAYOUT = 1
_DTYPES = {"features": "u2", "hidden": "u2", "tokens": "i4", "supervised": "?", "offsets": "i8"}
_EXPONENT = 0x7F80  # all ones in a bfloat16 that is infinite or no number


class Fingerprint(NamedTuple):
    """What features depend on; a store serves only readers with the same one. `taps` are `hidden_states` indices.

    `spec` and `weights` are digests, so that a checkpoint trained further under its old name is noticed.
    """

    model: str
    spec: str
    weights: str
    taps: tuple[int, ...]
    width: int
    dtype: str = "bfloat16"
    layout: int = LAYOUT


class Document(NamedTuple):
    """A document of n tokens. `supervised` marks the tokens to learn, `hidden` is the state after the final norm."""

    name: str
    tokens: Int32[np.ndarray, " n"]
    supervised: Bool[np.ndarray, " n"]
    features: BFloat16[np.ndarray, "n A D"]
    hidden: BFloat16[np.ndarray, "n D"]


class Shard(NamedTuple):
    """Some documents, one after the other; document i is rows offsets[i] .. offsets[i + 1] − 1."""

    names: list[str]
    offsets: Int64[np.ndarray, " docs_1"]
    tokens: Int32[np.ndarray, " n"]
    supervised: Bool[np.ndarray, " n"]
    features: UInt16[np.ndarray, "n A D"]
    hidden: UInt16[np.ndarray, "n D"]


class FeatureStore(NamedTuple):
    """An open store. `starts[s]` is the number of documents before shard s; `held_out` the share for validation."""

    folder: Path
    fingerprint: Fingerprint
    held_out: float
    shards: tuple[Shard, ...]
    starts: Int64[np.ndarray, " shards_1"]

    def name(self, i: int) -> str:
        """Name of document i."""
        shard, k = locate(self, i)
        return shard.names[k]


def fingerprint(source: str, spec: ModelSpec, params: dict[str, Any], taps: tuple[int, ...]) -> Fingerprint:
    """The fingerprint of a target."""
    text = json.dumps(plain(_changed(spec)), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Fingerprint(source, digest[:16], weights_digest(params), tuple(taps), spec.hidden_size)


def _changed(spec: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, so that a field added to a spec later changes no digest."""
    values = {field.name: (getattr(spec, field.name), field.default) for field in dataclasses.fields(spec)}
    return {
        name: _changed(value) if dataclasses.is_dataclass(value) else value
        for name, (value, default) in values.items()
        if value != default
    }


def chance(name: str, purpose: str) -> float:
    """A number in [0, 1) that depends on the names alone: the same in every process, uniform over documents."""
    digest = hashlib.blake2b(f"{purpose}/{name}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / (1 << 48)


# ---- writing


def start(folder: Path, mark: Fingerprint, held_out: float, max_length: int) -> set[str]:
    """Begin a store, or go on with one. Returns the names of documents that are done (stored or left out).

    Raises BadInput if the folder holds features of another target, or of documents cut or split in another way.
    """
    if not (folder / "index.json").exists():
        settings = {"held_out": held_out, "max_length": max_length, "shards": [], "left_out": []}
        _write_index(folder, {"fingerprint": mark._asdict(), **settings})
        return set()
    index = _read_index(folder)
    _require_same(folder, index, mark)
    for key, value in (("held_out", held_out), ("max_length", max_length)):
        if index[key] != value:
            raise BadInput(f"{folder} was begun with {key}={index[key]}, not {value}; choose another folder")
    names = (name for i in range(len(index["shards"])) for name in _names(folder, i))
    return {*names, *index["left_out"]}


def append(folder: Path, documents: Sequence[Document]) -> list[str]:
    """Write one more shard. Returns the names of documents left out because a feature is infinite or no number.

    Raises BadInput for an empty loss mask and for a full disk; either way, earlier shards stay as they were.
    """
    for document in documents:
        if not document.supervised.any():
            raise BadInput(
                f"document {document.name!r} has an empty loss mask: no token of it is an answer's"
            )
    good = [document for document in documents if _finite(document)]
    bad = [document.name for document in documents if not _finite(document)]
    index = _read_index(folder)
    number = len(index["shards"])
    try:
        if good:
            columns = _columns(good)
            for name, array in columns.items():
                _save(folder / f"{name}_{number:05d}.npy", array)
            write_atomic(folder / f"ids_{number:05d}.json", json.dumps([d.name for d in good]))
            index["shards"].append({"documents": len(good), "tokens": len(columns["tokens"])})
        index["left_out"] += bad
        _write_index(folder, index)
    except OSError as error:
        for path in (*folder.glob(f"*_{number:05d}.npy"), folder / f"ids_{number:05d}.json"):
            path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadInput(
            f"{folder}: the disk is full; its {number} earlier shards are kept, so free some space and run again"
        ) from None
    return bad


def _finite(document: Document) -> bool:
    arrays = (document.features, document.hidden)
    return not any(((a.view(np.uint16) & _EXPONENT) == _EXPONENT).any() for a in arrays)


def _columns(documents: Sequence[Document]) -> dict[str, np.ndarray]:
    lengths = [len(d.tokens) for d in documents]
    return {
        "features": np.concatenate([d.features.view(np.uint16) for d in documents]),
        "hidden": np.concatenate([d.hidden.view(np.uint16) for d in documents]),
        "tokens": np.concatenate([d.tokens for d in documents]).astype(np.int32),
        "supervised": np.concatenate([d.supervised for d in documents]).astype(bool),
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
    }


def _save(path: Path, array: np.ndarray) -> None:
    """A .npy file under its final name only when it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
            file.write(array.data)  # numpy's own writer loses the reason of a failure
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


# ---- reading


def open_store(folder: Path, mark: Fingerprint) -> FeatureStore:
    """Open a store for reading. Raises BadInput for another target's features and names damaged files."""
    index = _read_index(folder)
    _require_same(folder, index, mark)
    shards = tuple(_open_shard(folder, i, mark, sizes) for i, sizes in enumerate(index["shards"]))
    if not shards:
        raise BadInput(f"{folder} holds no documents yet; run python -m experiments.capture")
    starts = np.cumsum([0, *(len(shard.names) for shard in shards)], dtype=np.int64)
    return FeatureStore(folder, mark, index["held_out"], shards, starts)


def stored_taps(folder: Path) -> tuple[int, ...]:
    """The taps of a store, for a drafter that reads none of them. Raises BadInput for a folder that is no store."""
    return tuple(_read_index(folder)["fingerprint"]["taps"])


def size(store: FeatureStore) -> int:
    """Number of documents."""
    return int(store.starts[-1])


def locate(store: FeatureStore, i: int) -> tuple[Shard, int]:
    """The shard of document i, and its number there."""
    if not 0 <= i < size(store):
        raise IndexError(f"document {i} of {size(store)}")
    s = int(np.searchsorted(store.starts, i, side="right")) - 1
    return store.shards[s], i - int(store.starts[s])


def read(store: FeatureStore, i: int) -> Document:
    """Document i. Its arrays are views of the store: features are read from disk as they are used."""
    shard, k = locate(store, i)
    rows = slice(int(shard.offsets[k]), int(shard.offsets[k + 1]))
    features, hidden = (a[rows].view(ml_dtypes.bfloat16) for a in (shard.features, shard.hidden))
    return Document(shard.names[k], shard.tokens[rows], shard.supervised[rows], features, hidden)


def split(store: FeatureStore, share: float = 1.0) -> tuple[list[int], list[int]]:
    """Documents for training and for validation, by number.

    Both are in an order drawn from their names, so the first `share` of the training documents is a random sample of
    them, and a smaller one lies inside a larger one. Which documents are held out depends on their names alone.
    """
    names = [name for shard in store.shards for name in shard.names]
    order = sorted(range(len(names)), key=lambda i: chance(names[i], "order"))
    held = [i for i in order if chance(names[i], "held out") < store.held_out]
    training = [i for i in order if chance(names[i], "held out") >= store.held_out]
    return training[: math.ceil(len(training) * share)], held


def _require_same(folder: Path, index: dict[str, Any], mark: Fingerprint) -> None:
    found, wanted = index["fingerprint"], plain(mark._asdict())
    for key in {**wanted, **found}:
        if found.get(key) != wanted.get(key):
            there, here = found.get(key), wanted.get(key)
            raise BadInput(
                f"{folder} holds features of another target: {key} is {there} there and {here} here; "
                "choose another folder, or capture again"
            )


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    write_atomic(folder / "index.json", json.dumps(plain(index), indent=1) + "\n")


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    if not path.is_file():
        raise BadInput(f"there is no feature store at {folder}; run python -m experiments.capture first")
    index = _json(path)
    keys = {"fingerprint", "held_out", "max_length", "shards", "left_out"}
    if not isinstance(index, dict) or set(index) != keys:
        raise BadInput(f"{path} is not the index of a feature store; choose another folder")
    return index


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, reason: object) -> BadInput:
    line = " ".join(str(reason).split())
    return BadInput(
        f"{path} is missing or damaged ({line}); remove the folder {path.parent} and capture again"
    )


def _names(folder: Path, number: int) -> list[str]:
    path = folder / f"ids_{number:05d}.json"
    names = _json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _damaged(path, "expected a list of names")
    return names


def _open_shard(folder: Path, number: int, mark: Fingerprint, sizes: dict[str, int]) -> Shard:
    n, taps, width = sizes["tokens"], len(mark.taps), mark.width
    shapes = {"features": (n, taps, width), "hidden": (n, width), "offsets": (sizes["documents"] + 1,)}
    columns = {
        name: _column(folder / f"{name}_{number:05d}.npy", dtype, shapes.get(name, (n,)))
        for name, dtype in _DTYPES.items()
    }
    offsets, names = np.array(columns["offsets"]), _names(folder, number)
    if offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) < 1).any():
        raise _damaged(folder / f"offsets_{number:05d}.npy", "offsets do not cut the tokens into documents")
    if len(names) != sizes["documents"]:
        raise _damaged(folder / f"ids_{number:05d}.json", f"{len(names)} names")
    # Small columns go to memory: a mapped file keeps a file handle.
    tokens, supervised = np.array(columns["tokens"]), np.array(columns["supervised"])
    return Shard(names, offsets, tokens, supervised, columns["features"], columns["hidden"])


def _column(path: Path, dtype: str, shape: tuple[int, ...]) -> np.memmap:
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, error) from None
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise _damaged(path, f"{array.dtype} {array.shape} instead of {np.dtype(dtype)} {shape}")
    if path.stat().st_size != array.offset + array.nbytes:
        raise _damaged(path, "its size is wrong")
    return array
