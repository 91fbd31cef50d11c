"""Low-rank factors of a drafter's head, fitted to the states that the drafter really has, then trained alone.

Everything else is frozen. The states are the drafter's own at every unrolled depth, since a draft step at depth 3
retrieves from another distribution of states than one at depth 0.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.drafters import eagle_net as net
from eagle4.errors import BadInput
from eagle4.nn.dense import dense
from eagle4.retrieval.factors import Factors
from eagle4.specs import EagleSpec
from eagle4.train.losses import kl
from eagle4.train.optimise import as_float
from eagle4.train.unroll import Rows, supervised_rows, unroll

LOSSES = ("kl", "top")


@dataclass(frozen=True)
class HeadSpec:
    """How factors are trained. `loss`: kl (of the full head's distribution to the low-rank one) or top (recall: the
    full head's `top` best tokens, all alike, against everything else). 0 `steps` leaves the fitted factors as they are.
    """

    loss: str = "kl"
    steps: int = 200
    batch: int = 256
    lr: float = 1e-3
    top: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise BadInput(f"head.loss {self.loss!r} is not known; use one of {', '.join(LOSSES)}")
        for name, least in (("steps", 0), ("batch", 1), ("top", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"head.{name} must be at least {least}, got {getattr(self, name)}")
        if self.lr <= 0:
            raise BadInput(f"head.lr must be positive, got {self.lr}")


class States(NamedTuple):
    """What the head scored: the drafter's states, and the unrolled step that each comes from."""

    state: Float[np.ndarray, "N D"]
    depth: Int32[np.ndarray, " N"]


def states_of(
    params: dict[str, Any], spec: EagleSpec, rows: Rows, steps: int
) -> tuple[Float[Array, "J B T D"], Bool[Array, "J B T"]]:
    """The states that the head scores at each unrolled step, and which of them a draft would have."""
    rows = as_float(rows)
    outputs = unroll(params, spec, rows, steps)
    scored = jnp.stack([net.scored(params, spec, output) for output in outputs])
    return scored, jnp.stack([supervised_rows(rows, j) for j in range(steps)])


def covariance(states: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "D D"]:
    """E[h hᵀ], not centred: the mean's scores count too."""
    wide = states.astype(np.float64)
    return wide.T @ wide / len(wide)


def head_loss(
    factors: Factors, spec: HeadSpec, head: Float[Array, "V D"], states: Float[Array, "N D"]
) -> Float[Array, ""]:
    """Mean loss of the coarse scores against the full head's."""
    exact = jax.lax.stop_gradient(dense(states, head)).astype(jnp.float32)
    coarse = dense(dense(states, factors.down), factors.up).astype(jnp.float32)
    if spec.loss == "kl":
        return jnp.mean(kl(exact, coarse))
    best = jax.lax.top_k(jax.lax.optimization_barrier(exact), spec.top)[1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(coarse), best, axis=-1))


def optimiser(spec: HeadSpec) -> optax.GradientTransformation:
    """Adam along a cosine."""
    return optax.adam(optax.cosine_decay_schedule(spec.lr, max(spec.steps, 1), 0.05))


def update(
    spec: HeadSpec, factors: Factors, opt_state: Any, head: Float[Array, "V D"], states: Float[Array, "N D"]
) -> tuple[Factors, Any, Float[Array, ""]]:
    """One step on one batch of states; only the factors move."""
    loss, grads = jax.value_and_grad(head_loss)(factors, spec, head, states)
    updates, opt_state = optimiser(spec).update(grads, opt_state)
    moved = jax.tree.map(jnp.add, factors, updates)
    return moved, opt_state, loss


def bands(counts: np.ndarray, token: np.ndarray) -> Int32[np.ndarray, " N"]:
    """The frequency band of each token: 0 for the 256 most frequent in training text, 1 up to 2048, 2 up to 8192, 3."""
    rank = np.empty(len(counts), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return np.digitize(rank[token], (256, 2048, 8192)).astype(np.int32)
