"""Published drafters in float64 NumPy, straight from their raw tensors and config: no JAX, nothing of `eagle4`.

Written from the published algebra: EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) with the EAGLE-3.1 flags.
"""

import json

import numpy as np
from safetensors.numpy import load_file


def chain_logits(folder, states, final, tokens, embed, head, recurrence=None):
    """Logits over the target's whole vocabulary ([1 + steps, V], −inf where the head has no row).

    `states` [n + 1, T, Ht] are all hidden states of the target by index, `final` [T, Ht] the normed last one. The first
    T rows read them beside the first T tokens, each later token is fed with the state of the row before it. Logits are
    those of row T − 1 and of all later ones. `recurrence` True or False says what `norm_output` leaves open.
    """
    config = json.loads((folder / "config.json").read_text())
    w = {
        k.removeprefix("model."): v.astype(np.float64)
        for k, v in load_file(folder / "model.safetensors").items()
    }
    layer = config.get("transformer_layer_config", config)
    eps, first = (
        layer.get("rms_norm_eps", 1e-6),
        "midlayer" if "midlayer.mlp.up_proj.weight" in w else "layers.0",
    )
    embed = w.get("embed_tokens.weight", np.asarray(embed, np.float64))
    eagle1 = "lm_head.weight" not in w and "norm.weight" not in w
    recurrence = config.get("norm_output", False) if recurrence is None else recurrence
    fed = list(final.astype(np.float64) if eagle1 else first_state(w, config, states, eps))
    T = len(fed)
    keys, values, outputs = [], [], []
    for i, token in enumerate(tokens):
        s, e = fed[i], embed[token]
        if eagle1:
            residual = x = linear(w, "fc", np.concatenate([e, s]))
        else:
            g = norm(s, w[f"{first}.hidden_norm.weight"], eps)
            x = np.concatenate([norm(e, w[f"{first}.input_layernorm.weight"], eps), g])
            residual = g if config.get("norm_before_residual") else s
        h = residual + attend(w, f"{first}.self_attn", layer, x, i, keys, values, eps)
        z = norm(h, w[f"{first}.post_attention_layernorm.weight"], eps)
        gate = w[f"{first}.mlp.gate_proj.weight"] @ z
        h = h + w[f"{first}.mlp.down_proj.weight"] @ (
            gate / (1 + np.exp(-gate)) * (w[f"{first}.mlp.up_proj.weight"] @ z)
        )
        scored = h if eagle1 else norm(h, w["norm.weight"], eps)
        if i >= T - 1:
            fed.append(scored if recurrence else h)
        outputs.append(scored)
    rows = w.get("lm_head.weight", np.asarray(head, np.float64))
    logits = np.full((len(outputs), len(embed)), -np.inf)
    logits[:, np.arange(len(rows)) + w.get("d2t", np.zeros(len(rows))).astype(int)] = (
        np.stack(outputs) @ rows.T
    )
    return logits[T - 1 :]


def first_state(w, config, states, eps):
    """fc over the tapped hidden states, normed each or together where the config says so."""
    n = len(states) - 1
    if "speculators_model_type" in config:
        ids = config.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    else:
        outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        ids = [i + 1 for i in outputs or [1, n // 2 - 1, n - 4]]
    features = [states[i].astype(np.float64) for i in ids]
    if config.get("fc_norm"):
        features = [norm(f, w[f"fc_norm.{i}.weight"], eps) for i, f in enumerate(features)]
    joined = np.concatenate(features, -1)
    if config.get("norm_before_fc"):
        joined = norm(joined, w["input_norm.weight"], eps)
    return linear(w, "fc", joined)


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def attend(w, name, layer, x, position, keys, values, eps):
    """One row's attention over all rows so far, after adding its own key and value."""
    H, G = layer["num_attention_heads"], layer.get("num_key_value_heads", layer["num_attention_heads"])
    E = layer.get("head_dim") or layer["hidden_size"] // H
    q, k, v = (linear(w, f"{name}.{p}_proj", x).reshape(-1, E) for p in "qkv")
    if f"{name}.q_norm.weight" in w:
        q, k = norm(q, w[f"{name}.q_norm.weight"], eps), norm(k, w[f"{name}.k_norm.weight"], eps)
    keys.append(turn(k, position, layer))
    values.append(v)
    q, mixed = turn(q, position, layer), []
    for i in range(H):
        g = i // (H // G)
        scores = np.array([q[i] @ row[g] for row in keys]) / np.sqrt(E)
        weights = np.exp(scores - scores.max())
        mixed.append(weights / weights.sum() @ np.stack([row[g] for row in values]))
    return w[f"{name}.o_proj.weight"] @ np.concatenate(mixed)


def turn(x, position, layer):
    """Rotary embedding by complex numbers, Llama 3.1's stretched wavelengths included."""
    E = x.shape[-1]
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    theta = rope.get("rope_theta", layer.get("rope_theta", 10000.0))
    wavelength = 2 * np.pi * theta ** (np.arange(0, E, 2) / E)
    if rope.get("rope_type") == "llama3":
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for j, length in enumerate(wavelength):
            if length > original / low:
                wavelength[j] = length * factor
            elif length > original / high:
                blend = (original / length - low) / (high - low)
                wavelength[j] = 1 / ((1 - blend) / (length * factor) + blend / length)
    z = (x[:, : E // 2] + 1j * x[:, E // 2 :]) * np.exp(2j * np.pi * position / wavelength)
    return np.concatenate([z.real, z.imag], -1)
