"""Made-up published drafters: random tensors under published names, and our network run beside the oracle's."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from interop_oracle import chain_logits
from safetensors.numpy import load_file, save_file

from eagle4.drafters import eagle
from eagle4.drafters import eagle_net as net
from eagle4.interop import layer_ids
from eagle4.interop.read import read_drafter
from eagle4.nn.abstract import initialise
from eagle4.specs import EagleSpec, ModelSpec, TreeSpec
from eagle4.tree.grow import Frontier
from eagle4.types import Commit

V, HT, N = 24, 12, 8
TARGET = ModelSpec("llama", V, HT, 20, N, 4, 2, 4, 64)
LAYER = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": HT,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
IDS = [1, 2, 5, 7, 8, 11, 16, 19, 22]
_rng = np.random.default_rng(11)
TARGET_PARAMS = {
    "embed": jnp.asarray(_rng.standard_normal((V, HT)), jnp.bfloat16).astype(jnp.float32),
    "head": jnp.asarray(_rng.standard_normal((V, HT)) / 3, jnp.bfloat16).astype(jnp.float32),
}
STATES = _rng.standard_normal((N + 1, 4, HT)).astype(np.float32)
FINAL = _rng.standard_normal((4, HT)).astype(np.float32)
TOKENS = [3, 9, 14, 2, 20, 7]


def shapes(layout: str, layer: dict, flags: dict) -> dict[str, tuple[int, ...]]:
    """Published tensor names and shapes, written out."""
    D, F = layer["hidden_size"], layer["intermediate_size"]
    E = layer.get("head_dim", D // layer["num_attention_heads"])
    Q, K = layer["num_attention_heads"] * E, layer["num_key_value_heads"] * E
    eagle1, own = layout == "eagle1", flags.get("draft_vocab_size")
    at = "midlayer" if layout == "sglang" else "layers.0"
    A = flags.get("taps", 3)
    out = {
        "fc.weight": (D, 2 * D if eagle1 else A * HT),
        f"{at}.self_attn.q_proj.weight": (Q, D if eagle1 else 2 * D),
        f"{at}.self_attn.k_proj.weight": (K, D if eagle1 else 2 * D),
        f"{at}.self_attn.v_proj.weight": (K, D if eagle1 else 2 * D),
        f"{at}.self_attn.o_proj.weight": (D, Q),
        f"{at}.post_attention_layernorm.weight": (D,),
        f"{at}.mlp.gate_proj.weight": (F, D),
        f"{at}.mlp.up_proj.weight": (F, D),
        f"{at}.mlp.down_proj.weight": (D, F),
    }
    if flags.get("bias", eagle1):
        out["fc.bias"] = (D,)
    if flags.get("qkv_bias"):
        out |= {f"{at}.self_attn.{p}_proj.bias": (n,) for p, n in (("q", Q), ("k", K), ("v", K))}
    if layer["model_type"] == "qwen3":
        out |= {f"{at}.self_attn.{p}_norm.weight": (E,) for p in "qk"}
    if not eagle1:
        names = (f"{at}.hidden_norm", f"{at}.input_layernorm", "norm")
        out |= {f"{name}.weight": (D,) for name in names}
    if own:
        out["lm_head.weight"] = (own, D)
    if own and own < V:
        out |= {"d2t": (own,), "t2d": (V,)}
    if flags.get("fc_norm"):
        out |= {f"fc_norm.{i}.weight": (HT,) for i in range(A)}
    if flags.get("norm_before_fc"):
        out["input_norm.weight"] = (A * HT,)
    if layout == "speculators" or D != HT:
        out["embed_tokens.weight"] = (V, D)
    return out


def draw(name: str, shape: tuple[int, ...], rng) -> np.ndarray:
    if name == "d2t":
        return np.array(IDS) - np.arange(len(IDS))
    if name == "t2d":
        return np.isin(np.arange(V), IDS)
    if name == "embed_tokens.weight" and shape[1] == HT:
        return np.asarray(TARGET_PARAMS["embed"]).astype(ml_dtypes.bfloat16)
    value = rng.standard_normal(shape) / np.sqrt(shape[-1])
    return (value + ("norm" in name)).astype(ml_dtypes.bfloat16)


def without_nulls(layer: dict) -> dict:
    """LAYER with some fields changed, or taken out by None."""
    return {key: value for key, value in (LAYER | layer).items() if value is not None}


def publish(path: Path, layout: str, layer: dict | None = None, ids=None, prefix: str = "", **flags) -> Path:
    """A made-up checkpoint folder: random tensors under published names, and the config that goes with them."""
    layer, rng = without_nulls(layer or {}), np.random.default_rng(5)
    tensors = {name: draw(name, shape, rng) for name, shape in shapes(layout, layer, flags).items()}
    flags = {key: value for key, value in flags.items() if key != "taps"}
    if layout == "speculators":
        config = {"speculators_model_type": "eagle3", "speculators_version": "0.9.0", **flags}
        config |= {"transformer_layer_config": layer, "target_hidden_size": None, "speculators_config": {}}
        config |= {} if ids is None else {layer_ids.KEY: ids}
    else:
        config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **layer, **flags}
        config |= {} if ids is None else {"eagle_config": {layer_ids.KEY: ids, "use_aux_hidden_state": True}}
    if layer["hidden_size"] != HT:
        config["target_hidden_size"] = HT
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({prefix + name: value for name, value in tensors.items()}, path / "model.safetensors")
    return path


def change(folder: Path, config=None, tensors=None) -> Path:
    """Change a checkpoint in place: `config` and `tensors` are functions of the dict that they mutate."""
    if config:
        values = json.loads((folder / "config.json").read_text())
        config(values)
        (folder / "config.json").write_text(json.dumps(values))
    if tensors:
        values = load_file(folder / "model.safetensors")
        tensors(values)
        save_file(values, folder / "model.safetensors")
    return folder


REDUCED, FULL = {"draft_vocab_size": len(IDS)}, {"draft_vocab_size": V}
QWEN = {"model_type": "qwen3", "use_sliding_window": False}
CASES = {
    "eagle1": ("eagle1", {}),
    "eagle1 without bias, prefixed": ("eagle1", {"bias": False, "prefix": "model."}),
    "eagle1 with q, k, v biases": ("eagle1", {"qkv_bias": True, "layer": {"num_key_value_heads": 4}}),
    "eagle3": ("sglang", REDUCED),
    "eagle3, full head, no head_dim": (
        "sglang",
        {
            **FULL,
            "layer": {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1},
            "ids": [0, 4, 6],
        },
    ),
    "eagle3, target's head": ("sglang", {"ids": [2, 5, 1], "bias": True}),
    "eagle3.1": ("sglang", {**REDUCED, "fc_norm": True, "norm_output": True, "ids": [1, 3, 4]}),
    "eagle3, wide, llama3": ("sglang", {**REDUCED, "layer": {"hidden_size": 16, "rope_scaling": LLAMA3}}),
    "eagle3, five taps": ("sglang", {**FULL, "taps": 5, "ids": [0, 1, 3, 5, 7], "prefix": "model."}),
    "speculators": ("speculators", {**REDUCED, "norm_before_residual": True, "ids": [2, 5, 7]}),
    "speculators, its defaults": ("speculators", {**REDUCED, "norm_before_fc": True, "norm_output": True}),
    "speculators, qwen3": ("speculators", {**FULL, "layer": QWEN, "fc_norm": True, "ids": [1, 4, 8]}),
    "speculators, llama3": (
        "speculators",
        {**FULL, "layer": {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 300.0}}},
    ),
}


def checkpoint(path: Path, case: str) -> Path:
    layout, options = CASES[case]
    return publish(path, layout, **options)


def read(folder: Path, override=None):
    return read_drafter(folder, TARGET, override, TARGET_PARAMS)


def override_of(case: str) -> bool | None:
    """A flat config that says norm_output says too little."""
    layout, options = CASES[case]
    return True if layout == "sglang" and options.get("norm_output") else None


def drafted(spec: EagleSpec, params) -> jax.Array:
    """The layer's outputs of the oracle's chain, [1 + steps, D], by the drafter that decoding runs: the first rows
    committed, then one draft step a row."""
    T, tree = len(FINAL), TreeSpec("chain", depth=len(TOKENS) - len(FINAL))
    taps = [STATES[tap] for tap in spec.taps] or [STATES[0]]
    pairs = Commit(
        tokens=jnp.asarray(TOKENS[:T], jnp.int32)[None],
        num_committed=jnp.array([T], jnp.int32),
        features=jnp.asarray(np.stack(taps, axis=1))[None],
        hidden=jnp.asarray(FINAL)[None],
    )
    params = net.borrow(params, TARGET_PARAMS)
    state = eagle.empty(params, spec, jnp.zeros((1, 16), jnp.int32), 1)
    state = eagle.feed(params, spec, state, pairs, jnp.zeros(1, jnp.int32))
    carry = eagle.Branches(*eagle.empty_rows(spec, state, tree.depth), eagle.wide(state.output, 1))
    outputs = [state.output]
    for depth, token in enumerate(TOKENS[T:], 1):
        one, seen = jnp.zeros((1, 1), jnp.int32), (jnp.arange(tree.depth) < depth)[None, None]
        frontier = Frontier(one + token, one, one, one.astype(float), one == 0, jnp.int32(depth), seen)
        carry = eagle.branch(params, spec, state, tree, carry, frontier)
        outputs.append(carry.output[:, 0])
    return jnp.concatenate(outputs)


def imported_logits(spec: EagleSpec, params) -> np.ndarray:
    """The oracle's logits by our network."""
    scores = np.asarray(net.logits(net.borrow(params, TARGET_PARAMS), spec, drafted(spec, params)))
    logits = np.full((len(scores), V), -np.inf)
    logits[:, np.asarray(params.get("draft_ids", np.arange(V)))] = scores
    return logits


def agree(folder: Path, spec: EagleSpec, params, recurrence=None) -> None:
    """Raises AssertionError unless the imported network computes what the published tensors say."""
    embed, head = (np.asarray(TARGET_PARAMS[name]) for name in ("embed", "head"))
    wanted = chain_logits(folder, STATES, FINAL, TOKENS, embed, head, recurrence)
    np.testing.assert_allclose(imported_logits(spec, params), wanted, atol=1e-4, rtol=0)


def weights(spec: EagleSpec):
    """Random parameters, exact in bfloat16; norms and biases are not their trivial starting values."""
    params = initialise(net.abstract(spec, TARGET), jax.random.key(3))
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(4)
    noisy = [
        jnp.asarray((np.asarray(x) + 0.2 * rng.standard_normal(x.shape)).astype(ml_dtypes.bfloat16))
        for x in leaves
    ]
    params = structure.unflatten([x.astype(jnp.float32) for x in noisy])
    return params | ({"draft_ids": jnp.array(IDS, jnp.int32)} if spec.draft_vocab == len(IDS) else {})
