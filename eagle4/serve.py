"""A closed-loop batch: a fixed number of rows stay busy, finished ones are refilled from a queue of requests.

Runs the same jitted rounds as `decode.generate`. New requests are prefilled in small groups and placed into the rows
that are free; nothing else in the batch notices, because a row's draws depend on its own seed and positions only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int32

from eagle4 import decode
from eagle4.decode import Params
from eagle4.policy_spec import PolicySpec
from eagle4.specs import System
from eagle4.text import pad
from eagle4.types import DecodeState


class Request(NamedTuple):
    """A prompt to be answered with at most `max_new_tokens` tokens; `seed` decides all of its draws."""

    name: str
    ids: list[int]
    seed: int
    max_new_tokens: int


class Served(NamedTuple):
    """An answered request; `ids` are the answer's, a stop id included."""

    request: Request
    ids: list[int]


class Shape(NamedTuple):
    """Static sizes of a closed loop: rows, slots per row, rows prefilled at once, rounds between looks at the host."""

    batch: int
    capacity: int
    refill: int = 8
    stretch: int = 16


def serve(
    system: System,
    params: Params,
    policy: PolicySpec,
    requests: Iterable[Request],
    shape: Shape,
    stop_ids: tuple[int, ...] = (),
) -> Iterator[Served]:
    """Answers in the order in which they finish. Raises BadInput for a request that has no room in a row.

    A group of requests is prefilled as far as its longest prompt reaches: neighbours of one length waste nothing.
    """
    queue = iter(requests)
    state = idle(system, params, policy, shape, stop_ids)
    held: list[Request | None] = [None] * shape.batch
    while True:
        free = [i for i, request in enumerate(held) if request is None]
        # A group costs the same however many requests are in it, so it waits until it can be full.
        whole = min(shape.refill, shape.batch)
        while len(free) >= whole and (group := list(islice(queue, whole))):
            rows, free = free[: len(group)], free[len(group) :]
            state = place(
                state, prefill_group(system, params, policy, group, shape, stop_ids), slots(rows, shape)
            )
            for row, request in zip(rows, group):
                held[row] = request
        if not any(held):
            return
        state, _, _ = decode.generate(system, params, state, shape.stretch)
        done, starts, ends = (np.asarray(a) for a in (state.done, state.prompt_length, state.length))
        tokens = np.asarray(state.tokens)
        for row, request in enumerate(held):
            if request is not None and done[row]:
                yield Served(request, tokens[row, starts[row] : ends[row]].tolist())
                held[row] = None


def idle(
    system: System, params: Params, policy: PolicySpec, shape: Shape, stop_ids: tuple[int, ...]
) -> DecodeState:
    """A batch whose rows are all done, ready to be filled."""
    tokens, length = np.zeros((shape.batch, 1), np.int32), np.ones(shape.batch, np.int32)
    seeds = np.zeros(shape.batch, np.int32)
    return decode.begin(system, params, policy, tokens, length, seeds, 1, shape.capacity, stop_ids)


def prefill_group(
    system: System,
    params: Params,
    policy: PolicySpec,
    group: list[Request],
    shape: Shape,
    stop_ids: tuple[int, ...],
) -> DecodeState:
    """`refill` rows prefilled at once; a shorter group is filled up with its last request."""
    full = group + group[-1:] * (shape.refill - len(group))
    tokens, length = pad([r.ids for r in full], 1)
    seeds = np.array([r.seed for r in full], np.int32)
    new = np.array([r.max_new_tokens for r in full], np.int32)
    return decode.begin(system, params, policy, tokens, length, seeds, new, shape.capacity, stop_ids)


def slots(rows: list[int], shape: Shape) -> Int32[np.ndarray, " R"]:
    """Rows to place a group into; the filler's entries lie outside the batch and are dropped."""
    return np.array(rows + [shape.batch] * (shape.refill - len(rows)), np.int32)


def _place(state: DecodeState, group: DecodeState, rows: Int32[Array, " R"]) -> DecodeState:
    """Overwrite rows of the batch with freshly prefilled ones. Stop ids and policy belong to the whole batch."""

    def put(all_: Array, new: Array) -> Array:
        return all_.at[rows].set(new, mode="drop")

    by_row = [replace(s, stop_ids=(), policy=()) for s in (state, group)]
    return replace(jax.tree.map(put, *by_row), stop_ids=state.stop_ids, policy=state.policy)


place = jax.jit(_place, donate_argnames="state")
