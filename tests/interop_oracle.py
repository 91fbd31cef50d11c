"""Published drafters in float64 NumPy, straight from their raw tensors and config: no JAX, nothing of `eagle4`.

Written from the published algebra: EAGLE-1 (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840) with the EAGLE-3.1 flags, and
EAGLE-4's window and candidate head.
"""

import json

import numpy as np
from safetensors.numpy import load_file


def chain_logits(folder, states, final, tokens, embed, head, recurrence=None):
    """Logits over the target's whole vocabulary ([1 + steps, V], −inf where the head has no row): `chain_states` by the
    checkpoint's head, or by the target's."""
    _, w = published(folder)
    rows = w.get("lm_head.weight", np.asarray(head, np.float64))
    outputs = chain_states(folder, states, final, tokens, embed, recurrence)
    logits = np.full((len(outputs), len(embed)), -np.inf)
    logits[:, np.arange(len(rows)) + w.get("d2t", np.zeros(len(rows))).astype(int)] = outputs @ rows.T
    return logits


def candidates(folder, outputs, count):
    """EAGLE-4's proposal for each of the states: the ids of the best coarse scores, best first, and q over them."""
    _, w = published(folder)
    coarse = outputs @ w["efficient_lm_head_down_proj.weight"].T @ w["efficient_lm_head.weight"].T
    ids = np.argsort(-coarse, -1)[:, :count]
    exact = np.stack([w["lm_head.weight"][row] @ h for row, h in zip(ids, outputs)])
    q = np.exp(exact - exact.max(-1, keepdims=True))
    return ids, q / q.sum(-1, keepdims=True)


def published(folder):
    """The config and the tensors of a checkpoint, in float64 and without `model.`."""
    tensors = load_file(folder / "model.safetensors")
    w = {k.removeprefix("model."): v.astype(np.float64) for k, v in tensors.items()}
    w["fc.weight"] = w.pop("fc.linear.weight") if "fc.linear.weight" in w else w["fc.weight"]
    return json.loads((folder / "config.json").read_text()), w


def chain_states(folder, states, final, tokens, embed, recurrence=None):
    """What the head scores, [1 + steps, D].

    `states` [n + 1, T, Ht] are all hidden states of the target by index, `final` [T, Ht] the normed last one. The first
    T rows read them beside the first T tokens, each later token is fed with the state of the row before it. Row T − 1
    and all later ones are returned. `recurrence` True or False says what `norm_output` leaves open. With a window of W
    the first T rows see W keys, their own the last; later ones, drafted, see the last W of the T and each other.
    """
    config, w = published(folder)
    layer = config.get("transformer_layer_config", config)
    eps, first = (
        layer.get("rms_norm_eps", 1e-6),
        "midlayer" if "midlayer.mlp.up_proj.weight" in w else "layers.0",
    )
    embed = w.get("embed_tokens.weight", np.asarray(embed, np.float64))
    eagle1 = "lm_head.weight" not in w and "norm.weight" not in w
    recurrence = config.get("norm_output", False) if recurrence is None else recurrence
    fed = list(final.astype(np.float64) if eagle1 else first_state(w, config, states, eps))
    T, window = len(fed), window_of(layer)
    keys, values, outputs = [], [], []
    for i, token in enumerate(tokens):
        s, e = fed[i], embed[token]
        if eagle1:
            residual = x = linear(w, "fc", np.concatenate([e, s]))
        else:
            g = norm(s, w[f"{first}.hidden_norm.weight"], eps)
            x = np.concatenate([norm(e, w[f"{first}.input_layernorm.weight"], eps), g])
            residual = g if config.get("norm_before_residual") else s
        oldest = max(min(i + 1, T) - window, 0) if window else 0
        h = residual + attend(w, f"{first}.self_attn", layer, x, i, keys, values, eps, oldest)
        z = norm(h, w[f"{first}.post_attention_layernorm.weight"], eps)
        gate = w[f"{first}.mlp.gate_proj.weight"] @ z
        h = h + w[f"{first}.mlp.down_proj.weight"] @ (
            gate / (1 + np.exp(-gate)) * (w[f"{first}.mlp.up_proj.weight"] @ z)
        )
        scored = h if eagle1 else norm(h, w["norm.weight"], eps)
        if i >= T - 1:
            fed.append(scored if recurrence else h)
        outputs.append(scored)
    return np.stack(outputs[T - 1 :])


def window_of(layer):
    """How many keys back a row sees, 0 for all."""
    length = layer.get("sliding_window")
    on = length and layer.get("use_sliding_window", True) and layer.get("layer_types") != ["full_attention"]
    return length if on else 0


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


def attend(w, name, layer, x, position, keys, values, eps, oldest):
    """One row's attention over the rows from `oldest` on, after adding its own key and value."""
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
        scores = np.array([q[i] @ row[g] for row in keys[oldest:]]) / np.sqrt(E)
        weights = np.exp(scores - scores.max())
        mixed.append(weights / weights.sum() @ np.stack([row[g] for row in values[oldest:]]))
    return w[f"{name}.o_proj.weight"] @ np.concatenate(mixed)


def turn(x, position, layer):
    """Rotary embedding by complex numbers, Llama 3.1's stretched wavelengths included."""
    E = x.shape[-1]
    if not layer.get("use_rope", True):
        return x
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
