"""Low-rank factors of a head: coarse scores for the whole vocabulary at R / D of the price.

A head W [V, D] scores a state h with W·h. Factors give S·(P·h) with P [R, D] and S [V, R]. The best ones minimise the
expected squared error of the scores over the states that occur:

    E‖W h − S P h‖² = ‖(W − S P) C^½‖²,   C = E[h hᵀ]

which is solved by the leading right singular vectors of W C^½ (Eckart and Young, 1936): with C = I it is plain
truncated SVD, which cares for directions that no state ever takes.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from eagle4.errors import BadInput


class Factors(NamedTuple):
    """`down` projects a state to R numbers; the rows of `up` score them, one per head row."""

    down: Float[Array, "R D"]
    up: Float[Array, "V R"]


def truncated(
    head: Float[np.ndarray, "V D"],
    rank: int,
    covariance: Float[np.ndarray, "D D"] | None = None,
    weight: Float[np.ndarray, " V"] | None = None,
) -> Factors:
    """The factors of `rank` with the least expected squared score error (float64 inside, float32 out).

    `covariance` is that of the states (None: all directions alike). `weight` says how much each token's error counts,
    its frequency for instance (None: all alike). One symmetric eigendecomposition, D × D. Raises BadInput for a rank
    beyond D.
    """
    D = head.shape[1]
    if not 1 <= rank <= D:
        raise BadInput(f"retrieval.rank must lie in 1..{D}, the width of the drafter's state; got {rank}")
    W = np.asarray(head, np.float64)
    root, inverse = _roots(np.eye(D) if covariance is None else np.asarray(covariance, np.float64))
    scaled = W if weight is None else W * np.sqrt(np.asarray(weight, np.float64) / np.mean(weight))[:, None]
    _, vectors = np.linalg.eigh(root @ (scaled.T @ scaled) @ root)
    leading = vectors[:, ::-1][:, :rank]
    # Given the directions, the best rows are those of W itself, whatever weight each token has.
    return Factors(
        jnp.asarray(leading.T @ inverse, jnp.float32), jnp.asarray(W @ root @ leading, jnp.float32)
    )


def _roots(covariance: Float[np.ndarray, "D D"]) -> tuple[np.ndarray, np.ndarray]:
    """C^½ and C^−½; directions that hardly occur are lifted to 1e-6 of the largest, so that both exist."""
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 1e-6 * values[-1])
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T
