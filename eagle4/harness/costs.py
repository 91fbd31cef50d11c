"""What things cost, as tables that a policy can read inside a compiled program.

A table holds milliseconds over batch × context × size, made monotone, and is interpolated linearly. Tables are data:
sweeping them compiles nothing. Where they come from is in `measured` (timings) and `roofline` (peak figures).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from eagle4.errors import BadInput

AXES = ("batch", "context", "size")


class Grid(NamedTuple):
    """Milliseconds `ms` over three increasing axes: active rows, context (cache slots that are read), and a size."""

    batch: Float[Array, " NB"]
    context: Float[Array, " NC"]
    size: Float[Array, " NS"]
    ms: Float[Array, "NB NC NS"]


class CostTable(NamedTuple):
    """What a round is made of. Each part is a Grid; its size is

    verify: nodes per row, one forward pass of the target with acceptance. `verify` at 1 node is plain decoding's step.
    first:  1. What a round that drafts pays before its first draft step: feeding committed rows, and one row's head.
    step:   frontier width. One more level: layer and head for that many rows.
    """

    verify: Grid
    first: Grid
    step: Grid


def at(grid: Grid, batch: Any, context: Any, size: Any) -> Float[Array, ""]:
    """ms at a point: linear between neighbours, and outside the table what its nearest edge costs.

    A slope carried on beyond noisy timings could fall; whoever reads the table makes sure that it covers the run.
    """
    i, u = _place(grid.batch, batch)
    j, v = _place(grid.context, context)
    k, w = _place(grid.size, size)
    total = jnp.zeros(())
    for di, a in ((0, 1 - u), (1, u)):
        for dj, b in ((0, 1 - v), (1, v)):
            for dk, c in ((0, 1 - w), (1, w)):
                total += a * b * c * _entry(grid.ms, i + di, j + dj, k + dk)
    return total


def _entry(ms: Array, i: Array, j: Array, k: Array) -> Array:
    NB, NC, NS = ms.shape
    return ms[jnp.minimum(i, NB - 1), jnp.minimum(j, NC - 1), jnp.minimum(k, NS - 1)]


def _place(axis: Array, x: Any) -> tuple[Array, Array]:
    """The interval that holds x and how far into it x lies, 0 to 1; an axis of one point is flat."""
    if axis.shape[0] == 1:
        return jnp.int32(0), jnp.zeros(())
    x = jnp.asarray(x, jnp.float32)
    i = jnp.clip(jnp.searchsorted(axis, x, side="right") - 1, 0, axis.shape[0] - 2)
    return i, jnp.clip((x - axis[i]) / (axis[i + 1] - axis[i]), 0.0, 1.0)


def round_ms(
    table: CostTable, batch: Any, context: Any, width: int, levels: Any, rows: Any
) -> Float[Array, ""]:
    """Predicted ms of a round that drafts `levels` levels (0: none) and verifies `rows` nodes a row."""
    levels = jnp.asarray(levels)
    first = jnp.where(levels > 0, at(table.first, batch, context, 1), 0.0)
    steps = jnp.maximum(levels - 1, 0) * at(table.step, batch, context, width)
    return first + steps + at(table.verify, batch, context, rows)


def grid(batch: Any, context: Any, size: Any, ms: Any) -> Grid:
    """A checked Grid, made monotone: more rows, context or size never cost less.

    Noise in timings is what breaks monotony, and interference only ever adds time. So a point that costs more than a
    larger one is lowered to it: raised the other way, one disturbed point would lift all beyond it. Raises BadInput for
    axes that don't increase, and for costs that are negative or not finite.
    """
    axes = [np.asarray(axis, np.float32) for axis in (batch, context, size)]
    costs = np.asarray(ms, np.float32)
    for name, axis in zip(AXES, axes):
        if axis.ndim != 1 or len(axis) == 0 or axis[0] <= 0 or (np.diff(axis) <= 0).any():
            raise BadInput(
                f"cost table: {name} must be positive and increasing, got {np.asarray(axis).tolist()}"
            )
    if costs.shape != tuple(map(len, axes)):
        raise BadInput(
            f"cost table: ms has shape {list(costs.shape)}, its axes ask for {[len(a) for a in axes]}"
        )
    if not np.isfinite(costs).all() or (costs < 0).any():
        raise BadInput("cost table: costs must be finite and at least 0; measure the table again")
    for axis in range(3):
        costs = np.flip(np.minimum.accumulate(np.flip(costs, axis), axis), axis)
    return Grid(jnp.asarray(axes[0]), jnp.asarray(axes[1]), jnp.asarray(axes[2]), jnp.asarray(costs))


def free() -> Grid:
    """A part that costs nothing, for drafters without a network."""
    return grid([1], [1], [1], [[[0.0]]])
