"""How a drafter starts: as a copy of one of the target's layers, or at random."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

from eagle4.drafters import eagle_net as net
from eagle4.errors import BadInput
from eagle4.nn.abstract import initialise
from eagle4.specs import EagleSpec, ModelSpec
from eagle4.train.features import FeatureStore, read, split
from eagle4.train.objective import Frozen
from eagle4.train.spec import TrainSpec


def begin(
    spec: EagleSpec,
    train: TrainSpec,
    target: ModelSpec,
    target_params: dict[str, Any],
    store: FeatureStore,
    counts: np.ndarray,
) -> tuple[Frozen, dict[str, Any]]:
    """What stays frozen, and the parameters before the first step. `counts` [V]: how often each token is supervised.

    An own head starts as the target's rows for its tokens.
    """
    key = jax.random.key(train.seed)
    if train.start_layer is None:
        params = random_start(spec, target, key)
    else:
        sizes = stream_sizes(store, train.start_tap)
        params = target_start(spec, target, target_params, train.start_layer, train.start_tap, sizes, key)
    head = target_params.get("head", target_params["embed"])
    ids = None
    if spec.draft_vocab:
        whole = np.arange(target.vocab_size, dtype=np.int32)
        chosen = draft_vocabulary(counts, spec.draft_vocab) if spec.draft_vocab < target.vocab_size else whole
        ids = jnp.asarray(chosen) if spec.draft_vocab < target.vocab_size else None
        if spec.own_head:
            params["head"] = head[chosen].astype(jnp.float32)
    mask = jnp.asarray(frequent_tokens(counts, train.objective.frequent))
    return Frozen(target_params["embed"], head, mask, ids), params


class Sizes(NamedTuple):
    """Root mean squares: of a tap's residual stream, and of the final hidden states, which are normed."""

    tap: float
    hidden: float


def stream_sizes(store: FeatureStore, tap: int, documents: int = 8) -> Sizes:
    """Measured over a few training documents."""
    count = len(store.fingerprint.taps)
    if not -count <= tap < count:
        raise BadInput(f"train.start_tap={tap} is not one of the {count} taps")
    chosen = [read(store, i) for i in split(store)[0][:documents]]
    streams = (d.features[:, tap] for d in chosen), (d.hidden for d in chosen)
    rows = (np.concatenate([part.astype(np.float32) for part in stream]) for stream in streams)
    return Sizes(*(float(np.sqrt(np.mean(stream**2))) for stream in rows))


def random_start(spec: EagleSpec, target: ModelSpec, key: jax.Array) -> dict[str, Any]:
    """Random float32 parameters."""
    return initialise(net.abstract(spec, target), key)


def target_start(
    spec: EagleSpec,
    target: ModelSpec,
    target_params: dict[str, Any],
    layer: int,
    tap: int,
    sizes: Sizes,
    key: jax.Array,
) -> dict[str, Any]:
    """The target's layer `layer` (−1 the last) behind an fc that passes the state through (`tap`: which one).

    Where the layer reads embedding and state, the state's half of q, k, v is the target's and the embedding's half is
    0, so that the drafter begins as that layer. What the target has no counterpart for keeps its random start.

    Where states are normed (EAGLE-1, and EAGLE-3.1 from its second step on) they are much smaller than the target's
    residual stream. There the tap is brought to their size, and what the layer adds is scaled alike: the norms inside
    undo it, so the layer is still the target's, and all draft steps are of one kind.
    """
    if not -target.num_layers <= layer < target.num_layers:
        raise BadInput(f"train.start_layer={layer} is not a layer of the target; it has {target.num_layers}")
    if spec.layer is None or spec.layer.hidden_size != target.hidden_size:
        raise BadInput(
            "train.start_layer needs a drafter layer as wide as the target's; use train.start_layer=null"
        )
    params = random_start(spec, target, key)
    copied = jax.tree.map(lambda a: a.astype(jnp.float32), target_params["layers"][layer])
    D, block = target.hidden_size, params["layer"]
    odd = sorted(
        name
        for name, value in copied.items()
        if name in block and name not in "qkv" and value.shape != block[name].shape
    )
    if odd:
        raise BadInput(f"train.start_layer: {', '.join(odd)} of the target's layer have other shapes")
    for name, value in copied.items():
        if name not in block:
            continue
        wide = name in ("q", "k", "v") and spec.fusion == "taps"
        block[name] = jnp.concatenate([jnp.zeros_like(value), value], 1) if wide else value
    normed = spec.fusion == "concat2" or spec.norm_output
    scale = sizes.hidden / sizes.tap if normed else 1.0
    block |= {name: block[name] * scale for name in ("o", "down")}
    if spec.fusion == "concat2":
        params["fc"] = jnp.asarray(np.eye(D, 2 * D, D, dtype=np.float32))
        return params
    count = len(spec.taps)
    place = tap % count
    # hidden_norm takes the part that the layer's own input norm plays in the target.
    block["hidden_norm"], block["attn_norm"] = copied["attn_norm"], jnp.ones(D)
    params["norm"] = target_params["norm"].astype(jnp.float32)
    passed = np.eye(D, D * count, D * place, dtype=np.float32)
    if spec.fc_norm:
        weights = [jnp.full(D, sizes.tap * scale if i == place else 1.0) for i in range(count)]
        params["fc_norm"] = tuple(weights)
    elif spec.norm_before_fc:
        params["input_norm"] = jnp.full(D * count, sizes.tap * scale)
    else:
        passed = passed * scale
    params["fc"] = jnp.asarray(passed)
    return params


def frequent_tokens(counts: Int64[np.ndarray, " V"], size: int) -> np.ndarray:
    """Mask of the `size` most frequent tokens; ties go to the lower id."""
    order = np.argsort(-np.asarray(counts), kind="stable")
    mask = np.zeros(len(order), bool)
    mask[order[:size]] = True
    return mask


def draft_vocabulary(counts: Int64[np.ndarray, " V"], size: int) -> np.ndarray:
    """Target ids of a draft vocabulary, increasing: the `size` most frequent tokens of the training text."""
    return np.flatnonzero(frequent_tokens(counts, size)).astype(np.int32)
