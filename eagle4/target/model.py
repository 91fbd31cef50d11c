"""The target's forward pass: Llama, Qwen2 and Qwen3 in one set of functions.

Attention reads (committed cache ∪ the N new rows under `attend`) and returns the new rows' keys and values; writing
them is the caller's business (`target.cache.write`), after verification.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.nn.abstract import Leaf
from eagle4.nn.block import abstract_block, block
from eagle4.nn.dense import dense
from eagle4.nn.norm import rms_norm
from eagle4.nn.rope import rotation
from eagle4.specs import ModelSpec
from eagle4.types import KVCache, TargetOut


def abstract(spec: ModelSpec) -> dict[str, Any]:
    """The parameter tree as `Leaf`s; a tied model has no `head`."""
    tree: dict[str, Any] = {
        "embed": Leaf((spec.vocab_size, spec.hidden_size), ("vocab", "embed")),
        "layers": tuple(abstract_block(spec) for _ in range(spec.num_layers)),
        "norm": Leaf((spec.hidden_size,), (None,), "ones"),
    }
    if not spec.tie_embeddings:
        tree["head"] = Leaf((spec.vocab_size, spec.hidden_size), ("vocab", "embed"))
    return tree


def head(params: dict[str, Any], hidden: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
    """Logits in float32 from post-norm hidden states."""
    weight = params["head"] if "head" in params else params["embed"]
    with jax.named_scope("head"):
        return dense(hidden, weight).astype(jnp.float32)


def forward(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: Int32[Array, "B N"],
    positions: Int32[Array, "B N"],
    attend: Bool[Array, "B N N"],
    cache: KVCache | None = None,
    taps: tuple[int, ...] = (),
) -> TargetOut:
    """Everything but the logits (left empty, [B, 0, V]) for N new rows.

    `positions` are absolute; `attend[b, n, m]` says that row n sees new row m. All committed slots are seen, within
    the layer's sliding window where it has one. `taps` are `hidden_states` indices, 0..L.
    """
    x = jnp.take(params["embed"], tokens, axis=0)
    turn = rotation(positions, spec.rope, spec.head_dim)
    streams = [x]
    keys, values = [], []
    for i, layer in enumerate(params["layers"]):
        see_new, see_cached = visible(positions, attend, cache, spec.window(i))
        cached = None if cache is None else (cache.k[i], cache.v[i])
        with jax.named_scope(f"layer_{i}"):
            x, k, v = block(layer, spec, x, turn, see_new, cached, see_cached)
        streams.append(x)
        keys.append(k)
        values.append(v)
    hidden = rms_norm(x, params["norm"], spec.rms_norm_eps)
    B, N, D = x.shape
    features = jnp.stack([streams[t] for t in taps], axis=2) if taps else jnp.zeros((B, N, 0, D), x.dtype)
    empty = jnp.zeros((B, 0, spec.vocab_size), jnp.float32)
    return TargetOut(logits=empty, features=features, hidden=hidden, k=tuple(keys), v=tuple(values))


def apply(
    params: dict[str, Any],
    spec: ModelSpec,
    tokens: Int32[Array, "B N"],
    positions: Int32[Array, "B N"],
    attend: Bool[Array, "B N N"],
    cache: KVCache | None = None,
    taps: tuple[int, ...] = (),
) -> TargetOut:
    """`forward` with logits for every row."""
    out = forward(params, spec, tokens, positions, attend, cache, taps)
    return replace(out, logits=head(params, out.hidden))


def visible(
    positions: Int32[Array, "B N"], attend: Bool[Array, "B N N"], cache: KVCache | None, window: int
) -> tuple[Bool[Array, "B N N"], Bool[Array, "B N S"] | None]:
    """Masks over new rows and over cache slots: committed, and at most `window` − 1 positions back (0 = no limit).

    Nothing is evicted from a windowed layer's cache, so commit and rollback stay exact (pitfall A17).
    """
    see_new = attend
    if window:
        see_new = attend & (positions[:, :, None] - positions[:, None, :] < window)
    if cache is None:
        return see_new, None
    slot = jnp.arange(cache.k[0].shape[2])
    see_cached = jnp.broadcast_to(slot < cache.length[:, None, None], (*positions.shape, slot.shape[0]))
    if window:
        see_cached = see_cached & (positions[:, :, None] - slot < window)
    return see_new, see_cached
