"""Reading GGUF files: header, model spec, dequantised tensors.

The header is read here, with every length checked against the file: the `gguf` package's own reader takes
seconds for a vocabulary's worth of strings. Tensor types and dequantisation come from that package.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from eagle4.errors import BadInput
from eagle4.nn.rope import inverse_frequencies
from eagle4.specs import ModelSpec, RopeSpec
from eagle4.target import config

TOP_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
LAYER_NAMES = {
    "attn_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
ROPE_FACTORS = "rope_freqs.weight"

# Metadata under the architecture's name, and the config.json field of the same meaning.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_ALSO_READ = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "vocab_size",
}
_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is row-major ([out, in]); `start` and `size` are bytes in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


class Gguf(NamedTuple):
    """An open file: its bytes (memory-mapped), metadata as plain Python values, and its tensors by name."""

    path: Path
    data: np.ndarray
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def open_gguf(path: Path) -> Gguf:
    """Read the header (GGUF 2 and 3, little-endian); BadInput if the file is not one, cut or damaged."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        if bytes(data[:4]) != b"GGUF":
            raise BadInput(f"{path} is not a GGUF file (it starts with {bytes(data[:4])!r})")
        return Gguf(path, data, *_header(data.data))
    except BadInput:
        raise
    except (struct.error, ValueError, ArithmeticError) as error:
        raise BadInput(f"{path} is cut or damaged: {error}; fetch the file again") from error


def model_spec(file: Gguf) -> ModelSpec:
    """The spec of a GGUF file, by way of the config.json fields of the same meaning.

    The head is tied when `output.weight` is absent. Llama 3's rope is a tensor of divisors (`rope_freqs`),
    which must be those of the published formula. Architecture metadata that is not understood is refused.
    """
    family = config.known_family(str(file.metadata.get("general.architecture")), f"{file.path}: architecture")
    if file.metadata.get("split.count", 1) > 1:
        raise BadInput(f"{file.path} is one part of a split GGUF; merge the parts into one file first")
    prefix = family + "."
    own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    foreign = [k for k, v in own.items() if k not in {*_SIZES, *_YARN, *_ALSO_READ} and v not in (0, 1.0)]
    if foreign:
        raise BadInput(f"{file.path}: metadata {prefix}{foreign[0]} = {own[foreign[0]]!r} is not supported")
    missing = [prefix + k for k in _SIZES if k not in own]
    missing += [name for name in ("token_embd.weight",) if name not in file.tensors]
    if missing:
        raise BadInput(f"{file.path} lacks {', '.join(missing)}")
    try:
        return config.model_spec(_as_config(file, family, own))
    except BadInput as error:
        raise BadInput(f"{file.path}: {str(error).removeprefix('config.json: ')}") from error


def read_tensor(file: Gguf, name: str, spec: ModelSpec) -> np.ndarray:
    """A tensor in float32, rows of q and k in this project's order.

    Llama files store each head's rows interleaved, (0, E/2, 1, E/2 + 1, …), for a rope over neighbouring
    pairs; ours pairs i with i + E/2. Other families are stored unchanged.
    """
    info = file.tensors[name]
    raw = file.data[info.start : info.start + info.size].reshape(*info.shape[:-1], -1)
    try:
        value = np.array(dequantize(raw, info.kind), np.float32).reshape(info.shape)
    except NotImplementedError as error:
        raise BadInput(
            f"{file.path}: {name} has type {info.kind.name}, which cannot be dequantised"
        ) from error
    if spec.family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
        pairs = value.reshape(-1, spec.head_dim // 2, 2, value.shape[-1])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    return value


def _as_config(file: Gguf, family: str, own: Mapping[str, Any]) -> dict[str, Any]:
    heads = _same(file, own, "attention.head_count")
    head_dim = own.get("attention.key_length", own["embedding_length"] // max(heads, 1))
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    same = {"attention.value_length": head_dim, "rope.dimension_count": head_dim, "vocab_size": vocab_size}
    for key, value in same.items():
        if own.get(key, value) != value:
            raise BadInput(f"{key} = {own[key]} is not supported; this file needs {value}")
    fields = {name: own[key] for key, name in _SIZES.items()}
    return fields | {
        "model_type": family,
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": _same(
            file, {"attention.head_count_kv": heads, **own}, "attention.head_count_kv"
        ),
        "intermediate_size": _same(file, own, "feed_forward_length"),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_parameters": _rope(file, own, head_dim),
    }


def _same(file: Gguf, own: Mapping[str, Any], key: str) -> int:
    """A per-model number that may be stored once per layer."""
    values = own[key] if isinstance(own[key], list) else [own[key]]
    if len(set(values)) != 1:
        raise BadInput(f"{key} differs between layers, which is not supported")
    return values[0]


def _rope(file: Gguf, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    factor = own.get("rope.scaling.factor", 0.0) or 1.0
    kind = own.get("rope.scaling.type", "linear" if factor != 1 else "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise BadInput(f"{ROPE_FACTORS} beside rope.scaling.type = {kind} is not supported")
        return _llama3(file, own, head_dim)
    if kind == "none":
        return {}
    yarn = {name: own[key] for key, name in _YARN.items() if key in own} if kind == "yarn" else {}
    return {"rope_type": kind, "factor": factor, **yarn}


def _llama3(file: Gguf, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters that give the stored divisors: the largest is the factor, the rest is as published."""
    info = file.tensors[ROPE_FACTORS]
    stored = dequantize(file.data[info.start : info.start + info.size], info.kind).reshape(-1)
    rope = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theta = own.get("rope.freq_base", 10000.0)
    plain, _ = inverse_frequencies(RopeSpec(theta=theta), head_dim)
    scaled, _ = inverse_frequencies(RopeSpec("llama3", theta, max(rope["factor"], 1.0)), head_dim)
    if stored.shape != plain.shape or not np.allclose(plain / scaled, stored, rtol=1e-4):
        raise BadInput(f"{ROPE_FACTORS} holds divisors that are not those of Llama 3, which is not supported")
    return {"rope_type": "llama3", "original_max_position_embeddings": 8192, **rope}


def _header(data: memoryview) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    version, count, fields = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"version {version} is not 2 or 3 (little-endian)")
    at = 24
    metadata: dict[str, Any] = {}
    for _ in range(fields):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        metadata[key], at = _value(data, at + 4, GGUFValueType(kind))
    entries = []
    for _ in range(count):
        name, at = _string(data, at)
        (rank,) = struct.unpack_from("<I", data, at)
        if not 1 <= rank <= 4:
            raise ValueError(f"tensor {name} has {rank} dimensions")
        *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, at + 4)
        at += 4 + 8 * rank + 12
        entries.append((name, tuple(reversed(dims)), GGMLQuantizationType(kind), offset))
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(at / alignment) * alignment
    tensors = {entry[0]: _place(len(data), start, *entry) for entry in entries}
    if len(tensors) != count:
        raise ValueError("two tensors have the same name")
    return metadata, tensors


def _place(
    length: int, start: int, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
) -> TensorInfo:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = math.prod(shape) // block * block_bytes
    if shape[-1] % block:
        raise ValueError(
            f"tensor {name} has rows of {shape[-1]}, no multiple of the {kind.name} block {block}"
        )
    if start + offset + size > length:
        raise ValueError(f"tensor {name} ends at byte {start + offset + size} of {length}")
    return TensorInfo(kind, shape, start + offset, size)


def _string(data: memoryview, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise ValueError(f"a string ends at byte {end} of {len(data)}")
    return str(data[at + 8 : end], "utf-8"), end


def _value(data: memoryview, at: int, kind: GGUFValueType) -> tuple[Any, int]:
    if kind == GGUFValueType.STRING:
        return _string(data, at)
    if kind != GGUFValueType.ARRAY:
        dtype = _SCALARS[kind]
        value = np.frombuffer(data, dtype, 1, at)[0]
        # A float32 1e-05 reads as 1e-05, not as 9.99999974e-06.
        return float(str(value)) if kind == GGUFValueType.FLOAT32 else value.item(), at + dtype.itemsize
    item, length = struct.unpack_from("<IQ", data, at)
    item, at = GGUFValueType(item), at + 12
    if item in _SCALARS:
        dtype = _SCALARS[item]
        values = np.frombuffer(data, dtype, length, at) if length else np.zeros(0, dtype)
        return values.tolist(), at + values.nbytes
    if item != GGUFValueType.STRING:
        raise ValueError("arrays of arrays are not supported")
    strings = []
    for _ in range(length):
        text, at = _string(data, at)
        strings.append(text)
    return strings, at
