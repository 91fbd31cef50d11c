"""Trained drafters on disk: a folder with `drafter.safetensors`, `spec.json` and a card for people, `README.md`, and
low-rank factors of its head, `retrieval_r<rank>.safetensors`, where it has some.

Reading is strict both ways: every tensor that the spec asks for, none else, right shapes, and the target it was
trained for.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.fingerprint import weights_digest
from eagle4.retrieval.factors import Factors
from eagle4.specs import EagleSpec, ModelSpec

WEIGHTS, SPEC, CARD = "drafter.safetensors", "spec.json", "README.md"
FACTORS = "retrieval_r{rank}.safetensors"
FORMAT = "eagle4 drafter 1"


class Trained(NamedTuple):
    """A drafter network: its spec (complete) and its own parameters, the target's not among them."""

    spec: EagleSpec
    params: dict[str, Any]


def save_drafter(
    folder: Path | str, trained: Trained, target: ModelSpec, target_params: dict[str, Any], card: str
) -> None:
    """Write the three files, bfloat16 weights, each atomically and the spec last.

    A folder may be written again for the same spec and target: wherever that is interrupted, it holds a drafter that
    can be read. Raises BadInput for a folder that holds another one, and for parameters that could not be read back.
    """
    folder = Path(folder)
    about = {
        "format": FORMAT,
        "target": dataclasses.asdict(target),
        "target_weights": weights_digest(target_params),
        "eagle": dataclasses.asdict(trained.spec),
    }
    if (folder / SPEC).exists() and _about(folder) != _json_form(about):
        raise BadInput(f"{folder} holds a drafter of another spec or target; choose another folder")
    _check(folder / WEIGHTS, _wanted(trained.spec, target), _shapes(trained.params))
    flat = {
        name: np.asarray(value) if value.dtype == jnp.int32 else np.asarray(value).astype(ml_dtypes.bfloat16)
        for name, value in named(trained.params).items()
    }
    write_atomic(folder / WEIGHTS, save(flat, metadata={"format": FORMAT}))
    write_atomic(folder / CARD, card)
    write_atomic(folder / SPEC, json.dumps(about, indent=1) + "\n")


def load_drafter(folder: Path | str, target: ModelSpec, target_params: dict[str, Any]) -> Trained:
    """Read a drafter for this target, weights in the target's dtype. Raises BadInput naming what does not fit."""
    folder = Path(folder)
    about = _about(folder)
    spec = eagle_spec(about["eagle"], folder / SPEC)
    if about["target"] != _json_form(dataclasses.asdict(target)):
        raise BadInput(f"{folder} was trained for another model ({_differences(about['target'], target)})")
    if about["target_weights"] != weights_digest(target_params):
        raise BadInput(f"{folder} was trained for other weights of this architecture; train one for these")
    flat = _tensors(folder / WEIGHTS)
    _check(folder / WEIGHTS, _wanted(spec, target), _shapes(flat))
    tree: dict[str, Any] = eagle_net.abstract(spec, target)
    dtype = target_params["embed"].dtype
    weights = [jnp.asarray(flat[name].astype(np.float32), dtype) for name in named(tree)]
    params = jax.tree.unflatten(jax.tree.structure(tree), weights)
    if "draft_ids" in flat:
        params["draft_ids"] = _ids(folder / WEIGHTS, flat["draft_ids"], target.vocab_size)
    return Trained(spec, params)


def save_factors(folder: Path | str, factors: Factors, params: dict[str, Any]) -> Path:
    """Keep a drafter's low-rank factors beside it, bfloat16, one file a rank; `params` are the drafter's own."""
    path = Path(folder) / FACTORS.format(rank=factors.down.shape[0])
    flat = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in factors._asdict().items()}
    write_atomic(path, save(flat, metadata={"format": FORMAT, "drafter": weights_digest(params)}))
    return path


def load_factors(folder: Path | str, rank: int, params: dict[str, Any], head: jax.Array) -> Factors:
    """The factors of this rank, in the head's dtype. Raises BadInput for a rank that was not trained, and for factors
    of another drafter or head."""
    folder = Path(folder)
    path = folder / FACTORS.format(rank=rank)
    if not path.is_file():
        ranks = sorted(int(p.stem.rpartition("_r")[2]) for p in folder.glob(FACTORS.format(rank="*")))
        there = f"it has ranks {', '.join(map(str, ranks))}" if ranks else "it has none at all"
        raise BadInput(
            f"{folder} has no factors of rank {rank} ({there}); train them with experiments.train_head"
        )
    flat = _tensors(path)
    V, D = head.shape
    _check(path, {"down": (rank, D), "up": (V, rank)}, {name: value.shape for name, value in flat.items()})
    with safe_open(path, framework="np") as file:
        owner = (file.metadata() or {}).get("drafter")
    if owner != weights_digest(params):
        raise BadInput(f"{path} holds factors of another drafter; train them again for this one")
    return Factors(*(jnp.asarray(flat[name].astype(np.float32), head.dtype) for name in Factors._fields))


def named(tree: Any) -> dict[str, Any]:
    """Leaves under dotted names: `fc`, `layer.q`, `fc_norm.0`, in the tree's own order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf for path, leaf in leaves
    }


def eagle_spec(values: Any, where: Path) -> EagleSpec:
    """The complete spec of its JSON form. Raises BadInput for a key that is unknown, missing or of another type."""
    spec = _record(EagleSpec, values, where)
    if spec.layer is None:
        raise BadInput(f"{where}: EagleSpec.layer must be given, got None")
    return spec


def _record(kind: type, values: Any, where: Path) -> Any:
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict) or set(values) != set(hints):
        odd = ", ".join(sorted(set(values) ^ set(hints))) if isinstance(values, dict) else repr(values)
        raise BadInput(f"{where}: {kind.__name__} has unknown or missing keys: {odd}")
    fields = {
        key: _field(hints[key], value, f"{kind.__name__}.{key}", where) for key, value in values.items()
    }
    try:
        return kind(**fields)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error


def _field(hint: Any, value: Any, name: str, where: Path) -> Any:
    """A JSON value as a spec keeps it: lists become tuples, objects become specs."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is not None and (specs := [option for option in options if dataclasses.is_dataclass(option)]):
        return _record(typing.cast(type, specs[0]), value, where)
    if hint == tuple[int, ...] and isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    if type(value) in options or (type(value) is int and float in options):
        return value
    raise BadInput(f"{where}: {name} must be {getattr(hint, '__name__', hint)}, got {value!r}")


def _about(folder: Path) -> dict[str, Any]:
    path = folder / SPEC
    if not path.is_file():
        raise BadInput(
            f"{folder} is not a drafter checkpoint: it has no {SPEC}; train one with experiments.train, or name "
            "another drafter.checkpoint"
        )
    try:
        about = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise BadInput(f"{path} is not of format {FORMAT!r}; export it again with this version")
    if set(about) != {"format", "target", "target_weights", "eagle"}:
        raise BadInput(f"{path} must hold format, target, target_weights and eagle, not {', '.join(about)}")
    return about


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise BadInput(f"{path.parent} has no {path.name}; the checkpoint is incomplete") from error
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is cut or damaged: {error}; fetch the file again") from error


def _wanted(spec: EagleSpec, target: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of this spec holds."""
    shapes = _shapes(eagle_net.abstract(spec, target))
    return shapes | ({"draft_ids": (spec.draft_vocab,)} if 0 < spec.draft_vocab < target.vocab_size else {})


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named(tree).items()}


def _ids(path: Path, ids: np.ndarray, vocab_size: int) -> jax.Array:
    if ids.dtype != np.int32 or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise BadInput(f"{path}: draft_ids must be increasing ids below {vocab_size}, as int32")
    return jnp.asarray(ids)


def _check(path: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    if missing := sorted(set(wanted) - set(found)):
        raise BadInput(f"{path} lacks {', '.join(missing)}")
    if extra := sorted(set(found) - set(wanted)):
        raise BadInput(f"{path} also has {', '.join(extra)}, which its spec does not name")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise BadInput(f"{path}: {name} has shape {list(found[name])}, the spec says {list(shape)}")


def _json_form(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _differences(stored: Any, target: ModelSpec) -> str:
    now = _json_form(dataclasses.asdict(target))
    if not isinstance(stored, dict):
        return "its target is not described"
    odd = [k for k in sorted({*now, *stored}) if stored.get(k) != now.get(k)]
    return ", ".join(f"{k}: {stored.get(k)} there, {now.get(k)} here" for k in odd)
