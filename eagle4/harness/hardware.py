"""What the machine can do at most, and what a forward pass must cost at least (the roofline).

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle4.harness.clock import interleaved
from eagle4.specs import ModelSpec
from eagle4.target.model import abstract

COLUMNS = 4096
# Bytes read, and rows of the square product: far beyond any cache, and long beside the time of a launch.
SIZES = {"cpu": (512 * 2**20, 2048), "other": (2 * 2**30, 8192)}


class Limits(NamedTuple):
    """The machine's speed: bytes read from memory per second, and floating-point operations per second."""

    read_bytes_per_s: float
    flops_per_s: float


def measured_limits(
    dtype: Any = jnp.float32,
    repeats: int = 7,
    matrix_bytes: int | None = None,
    order: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] | None = None,
) -> Limits:
    """The best that was seen in `repeats` tries each.

    Reading: a float32 matrix of `matrix_bytes` (a multiple of 16 KiB) is multiplied by a vector, summed by rows, and
    searched for its maximum; the fastest counts. Arithmetic: a square product of `order` rows (2·order³ operations),
    in float32 and in `dtype`, at JAX's default precision, as in the model. An interrupted try is merely slower, so
    the best is an upper bound that was reached.
    """
    sizes = SIZES.get(jax.default_backend(), SIZES["other"])
    matrix = jnp.ones(((matrix_bytes or sizes[0]) // (4 * COLUMNS), COLUMNS), jnp.float32)
    vector = jnp.ones(COLUMNS, jnp.float32)
    reads = {
        "matrix-vector product": lambda: matrix @ vector,
        "sum": lambda: jnp.sum(matrix, axis=1),
        "maximum": lambda: jnp.max(matrix),
    }
    seconds = interleaved(reads, repeats, clock=clock, progress=progress)
    read_s = min(map(min, seconds.values()))
    order = order or sizes[1]
    squares = {
        kind: jnp.ones((order, order), kind)
        for kind in dict.fromkeys((jnp.dtype("float32"), jnp.dtype(dtype)))
    }
    products = {f"{kind} product": (lambda x=x: x @ x) for kind, x in squares.items()}
    seconds = interleaved(products, repeats, clock=clock, progress=progress)
    return Limits(matrix.nbytes / read_s, 2 * order**3 / min(map(min, seconds.values())))


def _read(params: dict[str, Any]) -> list[Any]:
    """The leaves that a forward pass reads whole: all but an embedding that is not the head too."""
    return jax.tree.leaves({k: v for k, v in params.items() if k != "embed" or "head" not in params})


def weight_bytes(params: dict[str, Any]) -> int:
    """Bytes of weights that a forward pass reads; of an embedding apart from the head only a few rows are, so none."""
    return sum(leaf.nbytes for leaf in _read(params))


def forward_limit_s(
    spec: ModelSpec, rows: int, limits: Limits, context: int, batch: int = 1, itemsize: int = 4
) -> float:
    """Seconds below which no forward pass of `rows` rows in all (batch × nodes) can be: max(bytes / bandwidth, flops / peak).

    bytes = itemsize · (W + batch · Σ_l 2·G·E·s_l): every weight once, head included, and the committed keys and values.
    flops = rows · (2·M + Σ_l 4·H·E·s_l): two per matrix weight, and scores and mixing over the context.
    s_l = min(context, window of layer l); M leaves the norms and biases out of W; the new rows' own attention
    and all activations are neglected. `itemsize` is that of weights and cache, in bytes.
    """
    shapes = [leaf.shape for leaf in _read(abstract(spec))]
    seen = sum(min(context, spec.window(i) or context) for i in range(spec.num_layers))
    weights = sum(map(math.prod, shapes))
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    read = itemsize * (weights + batch * 2 * spec.num_kv_heads * spec.head_dim * seen)
    flops = rows * (2 * matrices + 4 * spec.num_heads * spec.head_dim * seen)
    return max(read / limits.read_bytes_per_s, flops / limits.flops_per_s)
