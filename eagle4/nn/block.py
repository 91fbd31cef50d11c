"""One decoder layer: norm, attention, norm, feed-forward, with residuals."""

from typing import Any

from jaxtyping import Array, Bool, Float

from eagle4.nn.abstract import Leaf
from eagle4.nn.attention import attention
from eagle4.nn.dense import dense
from eagle4.nn.mlp import swiglu
from eagle4.nn.norm import rms_norm
from eagle4.nn.rope import rotate
from eagle4.specs import ModelSpec


def abstract_block(spec: ModelSpec) -> dict[str, Leaf]:
    """Shapes of one layer; weights are [out, in]."""
    D, F, E = spec.hidden_size, spec.ffn_size, spec.head_dim
    Q, K = spec.num_heads * E, spec.num_kv_heads * E
    tree = {
        "attn_norm": Leaf((D,), (None,), "ones"),
        "q": Leaf((Q, D), ("heads", "embed")),
        "k": Leaf((K, D), ("kv_heads", "embed")),
        "v": Leaf((K, D), ("kv_heads", "embed")),
        "o": Leaf((D, Q), ("embed", "heads")),
        "mlp_norm": Leaf((D,), (None,), "ones"),
        "gate": Leaf((F, D), ("ffn", "embed")),
        "up": Leaf((F, D), ("ffn", "embed")),
        "down": Leaf((D, F), ("embed", "ffn")),
    }
    if spec.qkv_bias:
        tree |= {
            "q_bias": Leaf((Q,), ("heads",), "zeros"),
            "k_bias": Leaf((K,), ("kv_heads",), "zeros"),
            "v_bias": Leaf((K,), ("kv_heads",), "zeros"),
        }
    if spec.qk_norm:
        tree |= {"q_norm": Leaf((E,), (None,), "ones"), "k_norm": Leaf((E,), (None,), "ones")}
    return tree


def project_qkv(
    params: dict[str, Any], spec: ModelSpec, x: Float[Array, "B N D"], cos: Array, sin: Array
) -> tuple[Float[Array, "B N H E"], Float[Array, "B G N E"], Float[Array, "B G N E"]]:
    """Queries, keys and values of the new rows, q and k normed (Qwen3) and rotated."""
    B, N, _ = x.shape
    E = spec.head_dim
    q = dense(x, params["q"], params.get("q_bias")).reshape(B, N, spec.num_heads, E)
    k = dense(x, params["k"], params.get("k_bias")).reshape(B, N, spec.num_kv_heads, E)
    v = dense(x, params["v"], params.get("v_bias")).reshape(B, N, spec.num_kv_heads, E)
    if spec.qk_norm:
        q = rms_norm(q, params["q_norm"], spec.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], spec.rms_norm_eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


def block(
    params: dict[str, Any],
    spec: ModelSpec,
    x: Float[Array, "B N D"],
    rotation: tuple[Array, Array],
    see_new: Bool[Array, "B N N"],
    cached: tuple[Array, Array] | None,
    see_cached: Bool[Array, "B N S"] | None,
) -> tuple[Float[Array, "B N D"], Float[Array, "B G N E"], Float[Array, "B G N E"]]:
    """The layer's output for N new rows, and their keys and values."""
    normed = rms_norm(x, params["attn_norm"], spec.rms_norm_eps)
    q, k, v = project_qkv(params, spec, normed, *rotation)
    x = x + dense(attention(q, (k, v), see_new, cached, see_cached), params["o"])
    normed = rms_norm(x, params["mlp_norm"], spec.rms_norm_eps)
    return x + swiglu(normed, params["gate"], params["up"], params["down"]), k, v
