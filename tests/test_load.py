"""Checkpoints into parameters: values, strictness both ways, and files that are cut, damaged or foreign."""

import json
import struct
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file

from eagle4.errors import BadInput
from eagle4.specs import ModelSpec, RopeSpec
from eagle4.target.load import load
from eagle4.target.model import abstract, apply

CONFIG = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
}
SHAPES = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
QKV = {"self_attn.q_proj.bias": (32,), "self_attn.k_proj.bias": (16,), "self_attn.v_proj.bias": (16,)}
QK_NORM = {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
FAMILY_SHAPES = {"llama": SHAPES, "qwen2": SHAPES | QKV, "qwen3": SHAPES | QK_NORM}


def weights(family: str = "llama", tied: bool = False, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Random weights under their safetensors names, exact in bfloat16."""
    generator = np.random.default_rng(5)
    shapes = {"model.embed_tokens.weight": (12, 32), "model.norm.weight": (32,)}
    if not tied:
        shapes["lm_head.weight"] = (12, 32)
    for i in range(2):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in FAMILY_SHAPES[family].items()}
    drawn = {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    return {name: x.astype(ml_dtypes.bfloat16).astype(dtype) for name, x in drawn.items()}


def folder(path: Path, tensors: dict[str, np.ndarray] | None = None, **config) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return path


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def same(got, wanted) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


# --- safetensors ---


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_tensor_lands_in_its_place(tmp_path, dtype):
    stored = weights("qwen2", dtype=dtype)
    spec, params, source = load(folder(tmp_path / "m", stored, model_type="qwen2"))
    assert jax.tree.map(lambda leaf: leaf.shape, abstract(spec)) == jax.tree.map(lambda x: x.shape, params)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}
    first, second = params["layers"]
    for got, name in [
        (params["embed"], "model.embed_tokens.weight"),
        (params["norm"], "model.norm.weight"),
        (params["head"], "lm_head.weight"),
        (first["attn_norm"], "model.layers.0.input_layernorm.weight"),
        (second["mlp_norm"], "model.layers.1.post_attention_layernorm.weight"),
        (second["q"], "model.layers.1.self_attn.q_proj.weight"),
        (second["k_bias"], "model.layers.1.self_attn.k_proj.bias"),
        (first["o"], "model.layers.0.self_attn.o_proj.weight"),
        (first["gate"], "model.layers.0.mlp.gate_proj.weight"),
        (second["up"], "model.layers.1.mlp.up_proj.weight"),
        (second["down"], "model.layers.1.mlp.down_proj.weight"),
    ]:
        np.testing.assert_array_equal(got, stored[name].astype(np.float32))
    assert source == ("folder", tmp_path / "m", {})


def test_dtype_and_place(tmp_path):
    stored, leaves = weights(), []

    def place(array, leaf):
        leaves.append((array.dtype, array.shape, leaf.shape, leaf.axes))
        return jax.device_put(array)

    params = load(folder(tmp_path / "m", stored), "bfloat16", place).params
    np.testing.assert_array_equal(
        params["head"].astype(jnp.float32), stored["lm_head.weight"]
    )  # exact: drawn in bfloat16
    assert len(leaves) == len(stored)
    assert {str(dtype) for dtype, *_ in leaves} == {"bfloat16"}
    assert all(shape == said for _, shape, said, _ in leaves)
    assert ("vocab", "embed") in {axes for *_, axes in leaves}
    with pytest.raises(BadInput, match=r"float16.*float32, bfloat16"):
        load(tmp_path / "m", "float16")


def test_shards_equal_one_file(tmp_path):
    stored = weights()
    one = load(folder(tmp_path / "one", stored)).params
    many = folder(tmp_path / "many")
    names = sorted(stored)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, own in parts.items():
        save_file({name: stored[name] for name in own}, many / part)
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    (many / "model.safetensors.index.json").write_text(json.dumps(index))
    same(load(many).params, one)

    save_file({name: stored[name] for name in (*parts["b.safetensors"], names[0])}, many / "b.safetensors")
    assert f"{names[0]} is also in another shard" in refused(many)
    (many / "b.safetensors").unlink()
    assert "names b.safetensors" in refused(many)
    index["weight_map"] = {"x": "../one/model.safetensors"}
    (many / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not in the folder" in refused(many)
    (many / "model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in refused(many)


@pytest.mark.parametrize("name", sorted(weights("qwen3")))
def test_each_missing_renamed_or_misshapen_tensor_is_named(tmp_path, name):
    stored = weights("qwen3")
    value = stored.pop(name)
    path = folder(tmp_path / "m", stored, model_type="qwen3")
    assert f"lacks {name};" in refused(path)
    save_file({**stored, name + "x": value}, path / "model.safetensors")
    assert f"lacks {name} and also has {name}x;" in refused(path)
    save_file({**stored, name: value[:-1]}, path / "model.safetensors")
    said = list(value.shape)
    assert f"{name} has shape {[said[0] - 1, *said[1:]]}, the config says {said}" in refused(path)


def test_extra_tensors(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    path = folder(tmp_path / "m", weights() | extra)
    same(load(path).params, load(folder(tmp_path / "plain", weights())).params)
    bias = {"model.layers.0.self_attn.o_proj.bias": np.ones(32, np.float32)}
    assert "also has model.layers.0.self_attn.o_proj.bias" in refused(folder(path, weights() | bias))
    many = {f"x{i}": np.ones(1, np.float32) for i in range(9)}
    assert "x0, x1, x2, x3 and 5 more" in refused(folder(path, weights() | many))
    assert "lacks lm_head.weight" in refused(folder(path, weights(tied=True)))


def test_tied_head(tmp_path):
    stored = weights(tied=True)
    path = folder(tmp_path / "m", stored, tie_word_embeddings=True)
    plain = load(path)
    assert "head" not in plain.params
    assert plain.spec.tie_embeddings
    copy = {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].copy()}
    same(load(folder(path, copy, tie_word_embeddings=True)).params, plain.params)
    copy["lm_head.weight"][3, 4] += 1
    assert "lm_head.weight differs" in refused(folder(path, copy, tie_word_embeddings=True))


def test_damaged_folders(tmp_path):
    path = folder(tmp_path / "m", weights())
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert "cut or damaged" in refused(path)
    file.write_bytes(b"\xff" * 200)
    assert "cut or damaged" in refused(path)
    stored = weights()
    stored["model.norm.weight"] = np.ones(32, np.int8)
    assert "model.norm.weight is I8" in refused(folder(path, stored))
    file.unlink()
    assert "has neither model.safetensors" in refused(path)
    (path / "config.json").write_text('{"model_type": ')
    assert "not valid JSON" in refused(path)
    (path / "config.json").write_text("[1]")
    assert "must hold a JSON object" in refused(path)
    (path / "config.json").unlink()
    (path / "m.gguf").touch()
    assert "has no config.json; give the path of m.gguf instead" in refused(path)
    assert "neither a checkpoint folder" in refused(tmp_path / "nowhere")
    assert f"{path}: config.json: mlp_bias" in refused(folder(path, weights(), mlp_bias=True))


# --- GGUF ---

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# One head of 8 rows as llama files store it: row pairs (i, i + 4) of ours stand next to each other.
INTERLEAVED = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def gguf_tensors(family: str, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under GGUF names, q and k interleaved for llama."""
    renamed = {}
    for name, value in stored.items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = value.shape[0] // 8
            value = value[np.concatenate([8 * h + INTERLEAVED for h in range(heads)])]
        parts = name.split(".")
        if parts[1] == "layers":
            new = f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:-1])]}.{parts[-1]}"
        else:
            new = GGUF_NAMES[name]
        renamed[new] = value
    return renamed


def write_gguf(
    path: Path, family: str, tensors: dict, own: dict | None = None, remove: tuple[str, ...] = ()
) -> Path:
    """`tensors` maps names to arrays or (bytes, type) pairs; `own` overrides metadata."""
    metadata = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0, "rope.dimension_count": 8, **(own or {}),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, family)
    kinds = {
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if key not in remove:
            name = key if key.startswith(("tokenizer.", "split.")) else f"{family}.{key}"
            kinds[type(value)](name, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_equals_safetensors(tmp_path, family, tied):
    """Same spec, same parameters; so llama's interleaved rows are undone and the others left alone."""
    stored = weights(family, tied)
    wanted = load(folder(tmp_path / "m", stored, model_type=family, tie_word_embeddings=tied))
    tensors = gguf_tensors(family, stored)
    tokenizer = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "gpt2"}
    path = write_gguf(tmp_path / "m.gguf", family, tensors, tokenizer)
    got = load(path)
    assert got.spec == wanted.spec
    same(got.params, wanted.params)
    assert got.tokenizer == ("gguf", path, tokenizer)


def test_permuted_llama_gives_the_same_logits(tmp_path):
    stored = weights()
    both = [
        load(folder(tmp_path / "m", stored)),
        load(write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors("llama", stored))),
    ]
    tokens, positions = jnp.array([[3, 1, 4, 1]]), jnp.arange(4)[None]
    attend = jnp.tril(jnp.ones((1, 4, 4), bool))
    forward = jax.jit(apply, static_argnames="spec")
    first, second = (forward(c.params, c.spec, tokens, positions, attend).logits for c in both)
    np.testing.assert_array_equal(first, second)


def half(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(-1, 1, shape).astype(np.float16)


def q8_0(generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and values: per 32 weights a float16 scale and 32 signed bytes."""
    scale = half(generator, (rows, columns // 32, 1))
    codes = generator.integers(-128, 128, (rows, columns // 32, 32), dtype=np.int8)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], -1).reshape(rows, -1)
    return raw, (scale.astype(np.float32) * codes).reshape(rows, columns)


def q4_1(generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Per 32 weights a float16 scale and minimum, and 16 bytes: low nibbles first, then high ones."""
    scale, minimum = half(generator, (rows, columns // 32, 1)), half(generator, (rows, columns // 32, 1))
    codes = generator.integers(0, 16, (rows, columns // 32, 32), dtype=np.uint8)
    packed = codes[..., :16] | codes[..., 16:] << 4
    raw = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), packed], -1).reshape(rows, -1)
    return raw, (scale.astype(np.float32) * codes + minimum.astype(np.float32)).reshape(rows, columns)


def test_quantised_tensors(tmp_path):
    generator = np.random.default_rng(11)
    tensors: dict = gguf_tensors("llama", weights())
    bytes8, values8 = q8_0(generator, 12, 32)
    bytes4, values4 = q4_1(generator, 32, 64)
    bytes_q, values_q = q4_1(generator, 32, 32)
    tensors["token_embd.weight"] = (bytes8, Quant.Q8_0)
    tensors["blk.1.ffn_down.weight"] = (bytes4, Quant.Q4_1)
    tensors["blk.0.attn_q.weight"] = (bytes_q, Quant.Q4_1)
    tensors["output.weight"] = tensors["output.weight"].astype(np.float16)
    params = load(write_gguf(tmp_path / "m.gguf", "llama", tensors)).params
    np.testing.assert_allclose(params["embed"], values8, rtol=1e-6)
    np.testing.assert_allclose(params["layers"][1]["down"], values4, rtol=1e-6, atol=1e-7)
    rows = np.concatenate([8 * h + INTERLEAVED for h in range(4)])
    np.testing.assert_allclose(np.asarray(params["layers"][0]["q"])[rows], values_q, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(params["head"], tensors["output.weight"].astype(np.float32))
    tensors["output_norm.weight"] = np.ones(32, np.int32)
    assert "output_norm.weight has type I32" in refused(write_gguf(tmp_path / "i.gguf", "llama", tensors))


def divisors(factor: float, theta: float, head_dim: int) -> np.ndarray:
    """Llama 3.1's rule, one by one: wavelengths below 2048 kept, above 8192 divided, blended between."""
    out = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        smooth = (8192 / wavelength - 1) / 3
        out.append(
            1.0 if wavelength < 2048
            else factor if wavelength > 8192
            else 1 / ((1 - smooth) / factor + smooth)
        )  # fmt: skip
    return np.array(out, np.float32)


def spec_of(path: Path) -> ModelSpec:
    return load(path).spec


def test_gguf_ropes(tmp_path):
    plain = gguf_tensors("llama", weights())
    path = tmp_path / "m.gguf"
    linear = write_gguf(path, "llama", plain, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert spec_of(linear).rope == RopeSpec("linear", 5000.0, 4.0, original_max_position=128)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn_file = write_gguf(path, "llama", plain, {**yarn, "rope.scaling.original_context_length": 32})
    assert spec_of(yarn_file).rope == RopeSpec("yarn", 5000.0, 4.0, original_max_position=32)
    assert spec_of(write_gguf(path, "llama", plain, {"rope.scaling.type": "none"})).rope == RopeSpec(
        theta=5000.0
    )
    assert spec_of(write_gguf(path, "llama", plain, remove=("rope.freq_base",))).rope == RopeSpec()

    factors = divisors(32.0, 5e5, 8)
    assert len(set(factors)) > 1
    llama3 = write_gguf(path, "llama", {**plain, "rope_freqs.weight": factors}, {"rope.freq_base": 5e5})
    assert spec_of(llama3).rope == RopeSpec("llama3", 5e5, 32.0, 1.0, 4.0, 8192)
    factors[1] = 1.5
    odd = write_gguf(path, "llama", {**plain, "rope_freqs.weight": factors}, {"rope.freq_base": 5e5})
    assert "not those of Llama 3" in refused(odd)
    assert "'longrope'" in refused(write_gguf(path, "llama", plain, {"rope.scaling.type": "longrope"}))


def test_gguf_metadata_is_understood_or_refused(tmp_path):
    plain = gguf_tensors("llama", weights())
    path = tmp_path / "m.gguf"
    wanted = load(write_gguf(path, "llama", plain)).spec
    per_layer = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]}
    assert load(write_gguf(path, "llama", plain, per_layer)).spec == wanted
    neutral = {"expert_count": 0, "attention.key_length": 8, "attention.value_length": 8, "vocab_size": 12}
    assert load(write_gguf(path, "llama", plain, neutral)).spec == wanted
    for own, words in [
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
        ({"rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor = 0.5"),
        ({"attention.head_count_kv": [2, 4]}, "attention.head_count_kv differs between layers"),
        ({"attention.value_length": 16}, "attention.value_length = 16"),
        ({"rope.dimension_count": 4}, "rope.dimension_count = 4"),
        ({"vocab_size": 13}, "vocab_size = 13"),
        ({"split.count": 2}, "split GGUF"),
        ({"block_count": 3}, "lacks blk.2.attn_norm.weight"),
        ({"feed_forward_length": 32}, "blk.0.ffn_down.weight has shape [32, 64], the config says [32, 32]"),
    ]:
        assert words in refused(write_gguf(path, "llama", plain, own))
    assert "lacks llama.block_count" in refused(write_gguf(path, "llama", plain, remove=("block_count",)))
    assert "'mamba' is not supported; known families: llama" in refused(write_gguf(path, "mamba", plain))
    extra = {**plain, "blk.0.attn_q.bias": np.ones(32, np.float32)}
    assert "also has blk.0.attn_q.bias" in refused(write_gguf(path, "llama", extra))


def test_damaged_gguf(tmp_path):
    """Every cut, in the header, between and inside tensors, is one line; so are absurd counts and lengths."""
    good = write_gguf(
        tmp_path / "good.gguf", "llama", gguf_tensors("llama", weights()), {"tokenizer.x": ["ab", "cd"]}
    )
    whole = good.read_bytes()
    bad = tmp_path / "bad.gguf"
    for cut in [0, 3, 4, 10, 23, *range(24, 1500, 37), len(whole) // 2, len(whole) - 64]:
        bad.write_bytes(whole[:cut])
        assert "bad.gguf is" in refused(bad)
    bad.write_bytes(b"PK\x03\x04" + whole[4:])
    assert "is not a GGUF file" in refused(bad)
    at = whole.index(b"tokenizer.x") + len(b"tokenizer.x")
    for offset, value in [(8, 2**40), (16, 2**40), (24, 2**60), (at + 8, 2**60), (at + 16, 2**62)]:
        bad.write_bytes(whole[:offset] + struct.pack("<Q", value) + whole[offset + 8 :])
        assert "cut or damaged" in refused(bad)
    for offset, value in [(4, 1), (4, 0x03000000), (at, 99), (at + 4, 77)]:
        bad.write_bytes(whole[:offset] + struct.pack("<I", value) + whole[offset + 4 :])
        assert "cut or damaged" in refused(bad)
