"""What the machine can do at most, and what a forward pass must cost at least (the roofline).

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle4.harness.clock import interleaved, median
from eagle4.nn.dense import dense
from eagle4.specs import ModelSpec
from eagle4.target.model import abstract

COLUMNS = 4096
# Bytes read, and rows of the square product: far beyond any cache, and long beside the time of a launch.
SIZES = {"cpu": (512 * 2**20, 2048), "other": (2 * 2**30, 8192)}
# Weight matrices by shape; the head stands alone.
SHAPES = {"q, o": ("q", "o"), "k, v": ("k", "v"), "gate, up": ("gate", "up"), "down": ("down",), "head": ()}


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


def reading(size: int) -> Callable[[], Any]:
    """A call that reads `size` bytes of float32 from memory and does next to nothing else: a matrix-vector product.

    Timed in turn with forward passes, it says what reading the weights costs in the same minutes.
    """
    matrix = jnp.ones((-(-size // (4 * COLUMNS)), COLUMNS), jnp.float32)
    vector = jnp.ones(COLUMNS, jnp.float32)
    return lambda: matrix @ vector


def _read(params: dict[str, Any]) -> list[Any]:
    """The leaves that a forward pass reads whole: all but an embedding that is not the head too."""
    return jax.tree.leaves({k: v for k, v in params.items() if k != "embed" or "head" not in params})


def weight_bytes(params: dict[str, Any]) -> int:
    """Bytes of weights that a forward pass reads; of an embedding apart from the head only a few rows are, so none."""
    return sum(leaf.nbytes for leaf in _read(params))


def forward_limit_s(
    spec: ModelSpec, rows: int, limits: Limits, context: int, batch: int = 1, itemsize: int = 4
) -> float:
    """Seconds that a forward pass takes at least: max(bytes / bandwidth, flops / peak), `rows` being batch × nodes.

    bytes = itemsize · (W + batch · Σ_l 2·G·E·s_l): every weight once, head included, and the committed keys and
    values. flops = rows · (2·M + Σ_l 4·H·E·s_l): two per matrix weight, and scores and mixing over the context.
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


def product_times(
    params: dict[str, Any],
    rows: Sequence[int],
    repeats: int,
    warmup: int = 2,
    stack_bytes: int = 256 * 2**20,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[Any], None] | None = None,
) -> list[dict[str, Any]]:
    """`dense` against the ordinary orientation on the model's own weights: ms for all weights of a shape together.

    As many layers as fill `stack_bytes` (beyond the caches) are stacked into one product, so that the cost of
    starting an operation fades, and the time is scaled to all of them. Nothing is fused here: `dense` pays for
    turning its result around, which a compiled forward pass hides, so its gain is rather understated.
    """
    found = []
    for kind, names in SHAPES.items():
        weights = [layer[name] for layer in params["layers"] for name in names]
        if kind == "head":
            weights = [params["head"] if "head" in params else params["embed"]]
        used = weights[: math.ceil(stack_bytes / weights[0].nbytes)]
        stack = jnp.concatenate(used) if len(used) > 1 else used[0]
        calls: dict[tuple[int, str], Callable[[], Any]] = {}
        for n in rows:
            x = jnp.ones((n, stack.shape[1]), stack.dtype)
            calls[n, "dense_ms"] = partial(dense, x, stack)
            calls[n, "ordinary_ms"] = partial(jnp.einsum, "TI,OI->TO", x, stack)
        seconds = interleaved(calls, repeats, warmup, clock, progress)
        scale = 1e3 * len(weights) / len(used)
        for n in rows:
            times = {way: scale * median(seconds[n, way]) for way in ("dense_ms", "ordinary_ms")}
            found.append({"weights": kind, "shape": list(weights[0].shape), "rows": n, **times})
    return found
