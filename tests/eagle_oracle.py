"""The EAGLE networks in float64 NumPy, one row after the other, as the papers write them down: no cache, no JAX.

A text of n + 1 tokens has n committed rows: row i reads the features of position i and token i + 1.
"""

from functools import cache

import jax
import numpy as np
from kit import eagle_params, numpy_streams, tiny_params

from eagle4.drafters import eagle_net
from eagle4.specs import EagleSpec, ModelSpec, RopeSpec

MODEL = ModelSpec("llama", 20, 16, 24, 3, 2, 1, 8, 256)
OWN_SHAPE = ModelSpec(
    "llama", 20, 12, 20, 1, 4, 2, 6, 256, 1e-4, RopeSpec("none"), qkv_bias=True, qk_norm=True
)
V = MODEL.vocab_size
VARIANTS = {
    "eagle1": EagleSpec("concat2"),
    "eagle1, bias, window": EagleSpec("concat2", fc_bias=True, window=6),
    "eagle3": EagleSpec(),
    "eagle3.1, reduced head": EagleSpec(taps=(0, 3), fc_norm=True, norm_output=True, draft_vocab=9),
    "one norm, own head, window": EagleSpec(
        norm_before_fc=True, norm_before_residual=True, fc_bias=True, draft_vocab=V, window=5
    ),
    "own shape, no rope": EagleSpec(taps=(1, 2, 3), norm_output=True, draft_vocab=V, layer=OWN_SHAPE),
}
WINDOWED, NORMED = "eagle1, bias, window", "eagle3.1, reduced head"
SPECS = {name: eagle_net.complete(spec, MODEL) for name, spec in VARIANTS.items()}


@cache
def streams(text: tuple[int, ...]) -> list[np.ndarray]:
    return numpy_streams(tiny_params(MODEL), MODEL, text)


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def turned(x, position, rope):
    """Heads [H, E], each pair (i, i + E/2) turned by position · θ^(−2i/E)."""
    half = x.shape[1] // 2
    angle = position * rope.theta ** (-np.arange(half) / half) * (rope.kind != "none")
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=1)


def first_state(w, spec, text, i):
    """What fc makes of the target's features at position i (EAGLE-1: they are the state)."""
    if spec.fusion == "concat2":
        return streams(text)[-1][i]
    eps = spec.layer.rms_norm_eps
    taps = [streams(text)[h][i] for h in spec.taps]
    if spec.fc_norm:
        taps = [norm(tap, weight, eps) for tap, weight in zip(taps, w["fc_norm"])]
    joined = np.concatenate(taps)
    if spec.norm_before_fc:
        joined = norm(joined, w["input_norm"], eps)
    return w["fc"] @ joined + w.get("fc_bias", 0)


def row(w, spec, token, state, position, keys, values):
    """One row through the layer: its output, after it has added its own key and value to those it sees."""
    layer, b, e = spec.layer, w["layer"], w["embed"][token]
    eps = layer.rms_norm_eps
    if spec.fusion == "concat2":
        residual = x = w["fc"] @ np.concatenate([e, state]) + w.get("fc_bias", 0)
    else:
        g = norm(state, b["hidden_norm"], eps)
        x = np.concatenate([norm(e, b["attn_norm"], eps), g])
        residual = g if spec.norm_before_residual else state
    q, k, v = ((b[n] @ x + b.get(f"{n}_bias", 0)).reshape(-1, layer.head_dim) for n in "qkv")
    if layer.qk_norm:
        q, k = ([norm(head, b[f"{n}_norm"], eps) for head in heads] for n, heads in (("q", q), ("k", k)))
    keys.append(turned(np.array(k), position, layer.rope))
    values.append(v)
    q, mixed = turned(np.array(q), position, layer.rope), []
    for h in range(layer.num_heads):
        g = h // (layer.num_heads // layer.num_kv_heads)
        s = np.array([key[g] @ q[h] for key in keys]) / np.sqrt(layer.head_dim)
        a = np.exp(s - s.max())
        mixed.append(a / a.sum() @ np.array([value[g] for value in values]))
    h = residual + b["o"] @ np.concatenate(mixed)
    y = norm(h, b["mlp_norm"], eps)
    gate = b["gate"] @ y
    return h + b["down"] @ (gate / (1 + np.exp(-gate)) * (b["up"] @ y))


@cache
def committed(name: str, text: tuple[int, ...]):
    """Keys, values and outputs of a text's committed rows."""
    spec, w = SPECS[name], weights64(name)
    keys, values, outputs = [], [], []
    for i in range(len(text) - 1):
        seen = slice(max(0, i + 1 - spec.window) if spec.window else 0, i)
        k, v = keys[seen], values[seen]
        outputs.append(row(w, spec, text[i + 1], first_state(w, spec, text, i), i, k, v))
        keys.append(k[-1])
        values.append(v[-1])
    return keys, values, outputs


@cache
def weights64(name: str):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), eagle_params(SPECS[name], MODEL))


def oracle(name: str, text: tuple[int, ...], path=()) -> np.ndarray:
    """Probabilities [V] of the token after `path`, itself drafted after `text`."""
    spec, w = SPECS[name], weights64(name)
    keys, values, outputs = committed(name, text)
    n, out = len(outputs), outputs[-1]
    keys, values = keys[-spec.window :], values[-spec.window :]  # all of them for a window of 0
    assert spec.layer is not None
    eps = spec.layer.rms_norm_eps

    def final(h):
        return h if spec.fusion == "concat2" else norm(h, w["norm"], eps)

    for j, token in enumerate(path):
        out = row(w, spec, token, final(out) if spec.norm_output else out, n + j, keys, values)
    logits = w["head"] @ final(out)
    p = np.zeros(V)
    p[w["draft_ids"].astype(int) if "draft_ids" in w else slice(None)] = np.exp(logits - logits.max())
    return p / p.sum()


def expanded(name: str, text: tuple[int, ...], depth, width, children, nodes) -> dict[tuple[int, ...], float]:
    """EAGLE-2 by hand: log probabilities of the best paths, by expanding the best `width` paths of each level."""
    pool, frontier = {}, {(): 0.0}
    for _ in range(depth):
        level = {}
        for path, score in frontier.items():
            p = oracle(name, text, path)
            level |= {(*path, int(t)): score + np.log(p[t]) for t in np.argsort(-p)[:children]}
        pool |= level
        frontier = dict(sorted(level.items(), key=lambda kv: -kv[1])[:width])
    return dict(sorted(pool.items(), key=lambda kv: -kv[1])[: nodes - 1])
