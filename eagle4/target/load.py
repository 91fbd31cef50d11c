"""Checkpoints into parameter trees, strict both ways: nothing missing, nothing left over, shapes right."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from eagle4.errors import BadInput
from eagle4.nn.abstract import Leaf
from eagle4.specs import ModelSpec
from eagle4.target import gguf_file
from eagle4.target.config import model_spec
from eagle4.target.model import abstract
from eagle4.text import TokenizerSource

TOP_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER_NAMES = {
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
# Buffers that old checkpoints hold; they follow from the config.
HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FLOAT_KINDS = ("F64", "F32", "F16", "BF16")

Place = Callable[[np.ndarray, Leaf], jax.Array]


class Checkpoint(NamedTuple):
    """A model as read from disk. `params` has the structure of `target.model.abstract(spec)`."""

    spec: ModelSpec
    params: dict[str, Any]
    tokenizer: TokenizerSource


class Store(NamedTuple):
    """Tensors by the names their format gives them: shapes at once, float32 values when asked for."""

    origin: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def load(path: Path | str, dtype: str = "float32", place: Place | None = None) -> Checkpoint:
    """Read a checkpoint folder (config.json and safetensors) or a .gguf file, which is dequantised.

    `dtype` is that of all parameters, float32 or bfloat16. `place` puts one host array on its devices (for a
    mesh: `jax.device_put` with a sharding made from the leaf's axes); without it, on the default device.
    Tensors pass through host memory one at a time. Raises BadInput naming the file and tensor at fault.
    """
    if dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    place = place or (lambda array, _: jax.device_put(array))
    path = Path(path)
    if path.is_dir():
        spec = _folder_spec(path)
        store = open_safetensors(path)
        if spec.tie_embeddings:
            store = _without_tied_head(store)
        params = _assemble(spec, store, TOP_NAMES, LAYER_NAMES, dtype, place)
        return Checkpoint(spec, params, TokenizerSource("folder", path, {}))
    if not path.is_file():
        raise BadInput(f"{path} is neither a checkpoint folder nor a .gguf file")
    file = gguf_file.open_gguf(path)
    spec = gguf_file.model_spec(file)
    store = Store(
        path,
        {name: info.shape for name, info in file.tensors.items() if name != gguf_file.ROPE_FACTORS},
        lambda name: gguf_file.read_tensor(file, name, spec),
    )
    params = _assemble(spec, store, gguf_file.TOP_NAMES, gguf_file.LAYER_NAMES, dtype, place)
    metadata = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
    return Checkpoint(spec, params, TokenizerSource("gguf", path, metadata))


def _assemble(
    spec: ModelSpec,
    store: Store,
    top: Mapping[str, str],
    layer: Mapping[str, str],
    dtype: str,
    place: Place,
) -> dict[str, Any]:
    tree = abstract(spec)
    names: dict[str, Any] = {key: top[key] for key in tree if key != "layers"}
    names["layers"] = tuple(
        {key: layer[key].format(i=i) for key in block} for i, block in enumerate(tree["layers"])
    )
    wanted = dict(zip(jax.tree.leaves(names), jax.tree.leaves(tree)))
    check_tensors(store, wanted)

    def parameter(name: str, leaf: Leaf) -> jax.Array:
        return place(store.read(name).astype(DTYPES[dtype], copy=False), leaf)

    return jax.tree.map(parameter, names, tree)


def check_tensors(store: Store, wanted: Mapping[str, Leaf]) -> None:
    """Raises BadInput naming what is missing, left over or misshapen."""
    missing = [name for name in wanted if name not in store.shapes]
    extra = [name for name in store.shapes if name not in wanted and not HARMLESS.fullmatch(name)]
    if missing or extra:
        parts = [
            f"{what} {_listed(names)}" for what, names in (("lacks", missing), ("also has", extra)) if names
        ]
        raise BadInput(f"{store.origin} {' and '.join(parts)}; do the weights belong to this config?")
    for name, leaf in wanted.items():
        if store.shapes[name] != leaf.shape:
            found, said = list(store.shapes[name]), list(leaf.shape)
            raise BadInput(f"{store.origin}: {name} has shape {found}, the config says {said}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _folder_spec(folder: Path) -> ModelSpec:
    config = read_json(folder / "config.json")
    try:
        return model_spec(config)
    except BadInput as error:
        raise BadInput(f"{folder}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises BadInput if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        found = sorted(p.name for p in path.parent.glob("*.gguf"))
        hint = f"; give the path of {found[0]} instead" if found else ""
        raise BadInput(f"{path.parent} has no {path.name}{hint}") from error
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} must hold a JSON object")
    return value


def open_safetensors(folder: Path, kinds: tuple[str, ...] = FLOAT_KINDS) -> Store:
    """All tensors of model.safetensors, or of the shards its index names; `kinds` are the dtypes that are read.

    Integers and truth values are read as they are, everything else as float32.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    handles: dict[str, Any] = {}
    for shard in _shards(folder):
        handle = _open(shard)
        for name in handle.keys():  # noqa: SIM118 (a handle, not a dict)
            part = handle.get_slice(name)
            if name in shapes:
                raise BadInput(f"{shard}: {name} is also in another shard")
            if part.get_dtype() not in kinds and not HARMLESS.fullmatch(name):
                raise BadInput(f"{shard}: {name} is {part.get_dtype()}; only {', '.join(kinds)} are read")
            shapes[name] = tuple(part.get_shape())
            handles[name] = handle

    def read(name: str) -> np.ndarray:
        stored = handles[name].get_tensor(name)
        return stored if stored.dtype.kind in "iub" else stored.astype(np.float32)

    return Store(folder, shapes, read)


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise BadInput(f"{folder} has neither {single.name} nor {index.name}; other formats are not read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index} has no weight_map")
    shards = [folder / str(name) for name in sorted(set(map(str, weight_map.values())))]
    for shard in shards:
        if shard.parent != folder or not shard.is_file():
            raise BadInput(
                f"{index} names {shard.name}, which is not in the folder; fetch the checkpoint again"
            )
    return shards


def _open(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="np")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{shard} is cut or damaged: {error}; fetch the file again") from error


def _without_tied_head(store: Store) -> Store:
    """Without the head that some checkpoints of tied models repeat; it must equal the embedding."""
    head, embed = TOP_NAMES["head"], TOP_NAMES["embed"]
    if head not in store.shapes or embed not in store.shapes:
        return store
    if not np.array_equal(store.read(head), store.read(embed)):
        raise BadInput(f"{store.origin}: config.json ties head and embedding, but {head} differs")
    return store._replace(shapes={name: shape for name, shape in store.shapes.items() if name != head})
