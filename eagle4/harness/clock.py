"""Timings that can be compared: warm, waited for, and taken in turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from eagle4.errors import BadInput

Name = TypeVar("Name")


def interleaved(
    functions: Mapping[Name, Callable[[], Any]],
    repeats: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[Name], None] | None = None,
) -> dict[Name, list[float]]:
    """Seconds of `repeats` calls of each function, in the order they were taken.

    JAX returns before the work is done, so each call is waited for (`jax.block_until_ready`). The first `warmup`
    calls, compilation among them, are not kept. The functions take turns, so that a machine which slows down or
    gets busy slows all of them alike and their ratios stay right. `progress` is told the name after every call,
    warm-up included. Raises BadInput unless repeats ≥ 1 and warmup ≥ 0.
    """
    if repeats < 1 or warmup < 0:
        raise BadInput(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    tell = progress or (lambda _: None)
    for name, function in functions.items():
        for _ in range(warmup):
            jax.block_until_ready(function())
            tell(name)
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            jax.block_until_ready(function())
            seconds[name].append(clock() - start)
            tell(name)
    return seconds


def median(seconds: Sequence[float]) -> float:
    """The middle timing: one interruption does not move it."""
    return float(np.median(seconds))


def spread(seconds: Sequence[float]) -> float:
    """Interquartile range over the median: how much to trust it (0 = all equal)."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle)
