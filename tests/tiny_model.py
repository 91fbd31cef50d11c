"""A tiny random Llama with the tiny tokenizer, as a checkpoint folder: whole apps run on it in seconds."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_tokenizer import MERGED, SPECIALS, write_folder

VOCAB, WIDTH, FFN, HEADS, KV_HEADS, HEAD = 256 + len(MERGED) + len(SPECIALS), 16, 24, 2, 1, 8
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
LAYER = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (FFN, WIDTH),
    "mlp.up_proj": (FFN, WIDTH),
    "mlp.down_proj": (WIDTH, FFN),
}


def tensors(seed: int = 3) -> dict[str, np.ndarray]:
    """Random weights, sharpened so that greedy argmaxes have clear margins."""
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, int], scale: float) -> np.ndarray:
        return (scale / np.sqrt(shape[1]) * rng.standard_normal(shape)).astype(np.float32)

    weights = {f"model.layers.0.{name}.weight": normal(shape, 1.0) for name, shape in LAYER.items()}
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        weights[f"model.{name}.weight"] = np.ones(WIDTH, np.float32)
    weights["model.embed_tokens.weight"] = normal((VOCAB, WIDTH), 4.0)
    weights["lm_head.weight"] = normal((VOCAB, WIDTH), 4.0)
    return weights


def write_model(path: Path, seed: int = 3, **config) -> Path:
    """The checkpoint folder of a tiny model; `config` changes entries of its config.json.

    Seed 3 answers in repetitive ASCII, seed 0 in bytes that are not UTF-8.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_folder(path)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors(seed), path / "model.safetensors")
    return path
