"""Tiny random models run through transformers: `python tests/golden/make_parity.py` rewrites parity_*.npz.

Each file holds config.json as a string, the weights under their checkpoint names (float16, exactly what the
model ran with), token ids [B, N], logits [B, N, V] and hidden_states [L + 1, B, N, D], the last of which
transformers gives after the final norm. Needs the parity extra (torch, transformers).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama_llama3": {
        "model_type": "llama",
        "head_dim": 16,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    },
    "llama_yarn": {
        "model_type": "llama",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **YARN},
    },
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000.0, "tie_word_embeddings": True},
    "qwen2_window": {
        "model_type": "qwen2",
        "rope_theta": 1000.0,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
BATCH, LENGTH = 2, 24


def run(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Build a random model of a config in transformers, run it, and return all that a golden file holds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = np.random.default_rng(seed)
    fields = json.loads(json.dumps(config))
    hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    hf_config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    weights = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            weights[name] = _draw(generator, name, tuple(value.shape))
            value.copy_(torch.from_numpy(weights[name].astype(np.float32)))
        ids = generator.integers(0, config["vocab_size"], (BATCH, LENGTH)).astype(np.int32)
        out = model(torch.from_numpy(ids).long(), output_hidden_states=True, use_cache=False)
    return {
        "config": np.array(json.dumps(config)),
        "ids": ids,
        "logits": out.logits.numpy(),
        "hidden_states": torch.stack(out.hidden_states).numpy(),
        **{f"weight:{name}": value for name, value in weights.items()},
    }


def _draw(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms around 1, biases, and matrices so large that attention is far from uniform; exact in float16."""
    noise = generator.standard_normal(shape)
    if name.endswith("norm.weight"):
        value = 1 + 0.3 * noise
    elif name.endswith("bias"):
        value = 0.5 * noise
    elif "embed" in name:
        value = noise
    else:
        value = 1.5 * noise / np.sqrt(shape[-1])
    return value.astype(np.float16)


def main() -> None:
    for seed, (name, own) in enumerate(CONFIGS.items()):
        golden = run({**SIZES, **own}, seed)
        np.savez_compressed(Path(__file__).parent / f"parity_{name}.npz", **golden)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
