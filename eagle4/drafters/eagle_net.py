"""The EAGLE network: one decoder layer that predicts the target's next hidden state, and thereby its next token.

Row i reads the target's features at position i and the embedding of token i + 1, and guesses token i + 2:

    features ── fuse ──► state ─┐
    embedding ──────────────────┴─ enter ─► q, k, v ─ attention ─ leave ─► output ─ scores ─► logits
                                                                             └─ recurrent ─► the next step's state

A draft step takes its parent's recurrent state where the first one took features. Drafting and training call these
same functions; they differ only in who attends to whom.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from eagle4.errors import BadInput
from eagle4.nn.abstract import Leaf
from eagle4.nn.block import abstract_block, project_qkv
from eagle4.nn.dense import dense
from eagle4.nn.mlp import swiglu
from eagle4.nn.norm import rms_norm
from eagle4.nn.rope import rotation
from eagle4.specs import EagleSpec, ModelSpec


class Entered(NamedTuple):
    """A row on its way into attention: where its residual starts, and its query, key and value."""

    residual: Float[Array, "B N D"]
    q: Float[Array, "B N H E"]
    k: Float[Array, "B G N E"]
    v: Float[Array, "B G N E"]


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: `hidden_states` 2, L/2 and L − 3 (EAGLE-3, arXiv 2503.01840, as published)."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def complete(spec: EagleSpec, target: ModelSpec) -> EagleSpec:
    """`spec` with everything it leaves to the target filled in: the layer's shape, and low, middle and high taps."""
    taps = spec.taps or (default_taps(target.num_layers) if spec.fusion == "taps" else ())
    layer = spec.layer or replace(target, num_layers=1, windows=())
    return replace(spec, taps=taps, layer=layer)


def abstract(spec: EagleSpec, target: ModelSpec) -> dict[str, Any]:
    """The parameter tree as `Leaf`s, of a spec that is `complete`. See `borrow` for embedding and head.

    `draft_ids` [Vd] are the target's ids of a reduced head's rows, increasing; they are data, not weights. Raises
    BadInput for a network that can't work on this target.
    """
    assert spec.layer is not None
    _check(spec, spec.layer, target)
    D, taps = spec.layer.hidden_size, spec.fusion == "taps"
    block: dict[str, Any] = abstract_block(spec.layer)
    read = (len(spec.taps) * target.hidden_size) if taps else 2 * D
    tree: dict[str, Any] = {"fc": Leaf((D, read), ("embed", None)), "layer": block}
    if spec.fc_bias:
        tree["fc_bias"] = Leaf((D,), (None,), "zeros")
    if taps:
        block |= {name: replace(block[name], shape=(block[name].shape[0], 2 * D)) for name in "qkv"}
        block["hidden_norm"] = Leaf((D,), (None,), "ones")
        tree["norm"] = Leaf((D,), (None,), "ones")
    else:
        del block["attn_norm"]
    if spec.fc_norm:
        tree["fc_norm"] = tuple(Leaf((target.hidden_size,), (None,), "ones") for _ in spec.taps)
    if spec.norm_before_fc:
        tree["input_norm"] = Leaf((read,), (None,), "ones")
    if spec.own_head:
        tree["head"] = Leaf((spec.draft_vocab, D), ("vocab", "embed"))
    if target.hidden_size != D:
        tree["embed"] = Leaf((target.vocab_size, D), ("vocab", "embed"))
    return tree


def _check(spec: EagleSpec, layer: ModelSpec, target: ModelSpec) -> None:
    if layer.num_layers != 1 or layer.windows:
        raise BadInput("eagle.layer must be one layer without windows; use eagle.window")
    if spec.draft_vocab > target.vocab_size:
        raise BadInput(
            f"eagle.draft_vocab={spec.draft_vocab} is more than the target's {target.vocab_size} ids"
        )
    if layer.hidden_size != target.hidden_size and (spec.fusion == "concat2" or not spec.own_head):
        raise BadInput(
            f"a drafter {layer.hidden_size} wide can't use the head of a target {target.hidden_size} wide; "
            "use eagle.fusion=taps with an own head, eagle.draft_vocab"
        )
    if (spec.fusion == "taps") != bool(spec.taps) or not all(0 <= t <= target.num_layers for t in spec.taps):
        raise BadInput(f"eagle.taps {spec.taps} must lie in 0..{target.num_layers}, at least one of them")


def borrow(params: dict[str, Any], target_params: dict[str, Any]) -> dict[str, Any]:
    """`params` with what a drafter doesn't own: the target's embedding and head, by reference, or rows of it."""
    embed = target_params["embed"]
    head = target_params.get("head", embed)
    if "draft_ids" in params and "head" not in params:
        head = head[params["draft_ids"]]
    return {"embed": embed, "head": head, **params}


def fuse(
    params: dict[str, Any],
    spec: EagleSpec,
    features: Float[Array, "B N A F"],
    hidden: Float[Array, "B N F"],
) -> Float[Array, "B N D"]:
    """The first state: fc over the tapped features, each or all of them normed first; or the last hidden state."""
    if spec.fusion == "concat2":
        return hidden
    assert spec.layer is not None
    eps = spec.layer.rms_norm_eps
    if spec.fc_norm:
        normed = [rms_norm(features[..., i, :], w, eps) for i, w in enumerate(params["fc_norm"])]
        features = jnp.stack(normed, axis=-2)
    joined = features.reshape(*features.shape[:-2], -1)
    if spec.norm_before_fc:
        joined = rms_norm(joined, params["input_norm"], eps)
    return dense(joined, params["fc"], params.get("fc_bias"))


def enter(
    params: dict[str, Any],
    spec: EagleSpec,
    tokens: Int32[Array, "B N"],
    state: Float[Array, "B N D"],
    positions: Int32[Array, "B N"],
) -> Entered:
    """Token and state into query, key and value; the embedding stands first where the two are joined.

    EAGLE-1 mixes them with fc before a layer that has no input norm; EAGLE-3 norms each and gives both to q, k, v.
    """
    layer, block = spec.layer, params["layer"]
    assert layer is not None
    embedding = jnp.take(params["embed"], tokens, axis=0)
    if spec.fusion == "concat2":
        residual = dense(jnp.concatenate([embedding, state], -1), params["fc"], params.get("fc_bias"))
        x = residual
    else:
        normed = rms_norm(state, block["hidden_norm"], layer.rms_norm_eps)
        residual = normed if spec.norm_before_residual else state
        x = jnp.concatenate([rms_norm(embedding, block["attn_norm"], layer.rms_norm_eps), normed], -1)
    return Entered(residual, *project_qkv(block, layer, x, *rotation(positions, layer.rope, layer.head_dim)))


def leave(
    params: dict[str, Any],
    spec: EagleSpec,
    residual: Float[Array, "B N D"],
    mixed: Float[Array, "B N HE"],
) -> Float[Array, "B N D"]:
    """The layer's output from its residual and its attention's result."""
    assert spec.layer is not None
    block = params["layer"]
    x = residual + dense(mixed, block["o"])
    normed = rms_norm(x, block["mlp_norm"], spec.layer.rms_norm_eps)
    return x + swiglu(normed, block["gate"], block["up"], block["down"])


def recurrent(params: dict[str, Any], spec: EagleSpec, output: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
    """The state that the next draft step reads: the layer's output, normed in EAGLE-3.1."""
    return scored(params, spec, output) if spec.norm_output else output


def scored(params: dict[str, Any], spec: EagleSpec, output: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
    """What the head scores: the normed output; EAGLE-1's output stands for a normed state already."""
    if spec.fusion == "concat2":
        return output
    assert spec.layer is not None
    return rms_norm(output, params["norm"], spec.layer.rms_norm_eps)


def logits(params: dict[str, Any], spec: EagleSpec, output: Float[Array, "*T D"]) -> Float[Array, "*T Vd"]:
    """float32 logits over the head's rows: the whole vocabulary, or the draft vocabulary `draft_ids`."""
    with jax.named_scope("draft_head"):
        return dense(scored(params, spec, output), params["head"]).astype(jnp.float32)
