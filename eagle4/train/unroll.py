"""Training-time test: the drafter fed its own states for several steps, as it will be when it drafts.

EAGLE-3 (arXiv 2503.01840 §3.1). Row i, step j stands for the draft step at depth j after position i was committed:

    step   reads token   state                     rope position   sees
    0      x[i+1]        fused features of i       i               rows ≤ i of step 0
    j      x[i+1+j]      own output of step j−1    i + j           rows ≤ i of step 0, own row of steps 1..j
                                                                   and predicts x[i+2+j]
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.drafters import eagle_net as net
from eagle4.specs import EagleSpec


class Rows(NamedTuple):
    """Packed documents on the device; `segment` tells them apart (0 = padding), `position` restarts in each."""

    tokens: Int32[Array, "B T"]
    supervised: Bool[Array, "B T"]
    features: Float[Array, "B T A F"]
    hidden: Float[Array, "B T F"]
    segment: Int32[Array, "B T"]
    position: Int32[Array, "B T"]


def ahead(values: Array, by: int) -> Array:
    """values[:, i + by] at i, zeros past the end."""
    if by == 0:
        return values
    pad = [(0, 0)] * values.ndim
    pad[1] = (0, by)
    return jnp.pad(values[:, by:], pad)


def supervised_rows(rows: Rows, step: int) -> Bool[Array, "B T"]:
    """Rows whose step j guesses what a draft will have to guess: an answer token, after a root of the answer.

    The root x[i+1] is the first token a drafter is given after the target's own; x[i+2+j] is what is guessed.
    """
    label = ahead(rows.segment, 2 + step) == rows.segment
    return label & (rows.segment > 0) & ahead(rows.supervised, 1) & ahead(rows.supervised, 2 + step)


def earlier_rows(rows: Rows, window: int) -> Bool[Array, "B T T"]:
    """Which step-0 rows a row sees: its own document's, up to itself, at most `window` − 1 back (0 = all)."""
    T = rows.tokens.shape[1]
    back = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    near = (back >= 0) & ((back < window) if window else True)
    return near & (rows.segment[:, :, None] == rows.segment[:, None, :])


def diagonal_attention(
    q: Float[Array, "B T H E"],
    base: tuple[Float[Array, "B G T E"], Float[Array, "B G T E"]],
    see: Bool[Array, "B T T"],
    own: list[tuple[Float[Array, "B G T E"], Float[Array, "B G T E"]]],
) -> Float[Array, "B T HE"]:
    """One softmax over the step-0 rows under `see` and the row's own keys of later steps."""
    B, T, H, E = q.shape
    G = base[0].shape[1]
    rows = q.reshape(B, T, G, H // G, E) / math.sqrt(E)
    scores = jnp.einsum("BTGRE,BGSE->BGRTS", rows, base[0])
    scores = [jnp.where(see[:, None, None], scores, jnp.finfo(scores.dtype).min)]
    scores += [jnp.einsum("BTGRE,BGTE->BGRT", rows, k)[..., None] for k, _ in own]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    mixed = jnp.einsum("BGRTS,BGSE->BTGRE", weights[..., :T], base[1])
    for s, (_, v) in enumerate(own):
        mixed = mixed + jnp.einsum("BGRT,BGTE->BTGRE", weights[..., T + s], v)
    return mixed.reshape(B, T, H * E)


def unroll(params: dict[str, Any], spec: EagleSpec, rows: Rows, steps: int) -> list[Float[Array, "B T D"]]:
    """The layer's output of every row at steps 0 .. steps − 1; see the table above."""
    see = earlier_rows(rows, spec.window)
    state = net.fuse(params, spec, rows.features, rows.hidden)
    outputs, base, own = [], None, []
    for step in range(steps):
        row = net.enter(params, spec, ahead(rows.tokens, 1 + step), state, rows.position + step)
        if base is None:
            base = (row.k, row.v)
        else:
            own.append((row.k, row.v))
        output = net.leave(params, spec, row.residual, diagonal_attention(row.q, base, see, own))
        outputs.append(output)
        state = net.recurrent(params, spec, output)
    return outputs
