"""What a draft step of an EAGLE network costs, body and head apart, as shares of a plain decode step."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle4 import decode
from eagle4.drafters import eagle
from eagle4.drafters.eagle import Branches, EagleState
from eagle4.errors import BadInput
from eagle4.forward_cost import WARMUP, Tell, check_positions, forward_calls
from eagle4.harness.clock import interleaved, median, spread
from eagle4.harness.roofline import FED
from eagle4.methods import Method
from eagle4.specs import DrafterSpec, EagleSpec, TreeSpec
from eagle4.target.load import Checkpoint
from eagle4.tree.grow import Frontier
from eagle4.types import Commit, KVCache


def draft_times(
    model: Checkpoint, heads: Mapping[str, Method], context: int, rows: list[int], repeats: int, tell: Tell
) -> list[dict[str, Any]]:
    """Median ms of a plain decode step and, for each number of rows, of the drafter's parts, all timed in turn.

    `heads` are methods of one network under their heads' names. body: the layer over a frontier of so many rows, behind
    `context` committed ones. feed: the layer over so many committed rows, as after a round. And by head, head: scores
    of so many rows and their likeliest tokens; step: body and head in one program, as in a round.
    """
    first = next(iter(heads.values()))
    if first.system.drafter.eagle is None:
        raise BadInput(
            f"method {first.name!r} drafts without a network; use eagle1, eagle2, eagle3 or eagle3_1"
        )
    check_positions(model.spec, context, max(rows))
    calls: dict[tuple[str, int], Callable[[], Any]] = {
        ("plain decode step", 1): forward_calls(model, 1, context, [1])[1]
    }
    for n in rows:
        for name, method in heads.items():
            made = parts(method.params.drafter, method.system.drafter, context, n)
            if method is first:
                calls |= {(what, n): made[what] for what in ("body", "feed")}
            calls |= {(f"{what} {name}", n): made[what] for what in ("head", "step")}
    seconds = interleaved(calls, repeats, WARMUP, progress=tell)
    step = median(seconds["plain decode step", 1])
    return [
        {"what": what, "rows": n, "ms": 1e3 * median(s), "spread": spread(s), "share": median(s) / step}
        for (what, n), s in seconds.items()
    ]


def parts(
    params: Any, drafter: DrafterSpec, context: int, n: int, batch: int = 1
) -> dict[str, Callable[[], Any]]:
    """The parts with n rows in each of `batch` sequences, compiled when first called."""
    spec = drafter.eagle
    assert spec is not None
    x = inputs(params, spec, context, n, batch)
    return {
        "body": partial(decode.jit_call, partial(body, spec, x.tree), params, x.state, x.carry, x.frontier),
        "feed": partial(decode.jit_call, partial(feed, spec), params, x.state, x.pairs, x.start),
        "head": partial(decode.jit_call, partial(head, drafter, x.tree), params, x.carry.output),
        "step": partial(
            decode.jit_call, partial(level, drafter, x.tree), params, x.state, x.carry, x.frontier
        ),
    }


def step_call(params: Any, drafter: DrafterSpec, context: int, width: int, batch: int) -> Callable[[], Any]:
    """One more level, layer and head in one program as in a round, over a frontier of `width` rows a sequence."""
    assert drafter.eagle is not None
    x = inputs(params, drafter.eagle, context, width, batch)
    return partial(decode.jit_call, partial(level, drafter, x.tree), params, x.state, x.carry, x.frontier)


def first_call(params: Any, drafter: DrafterSpec, context: int, batch: int) -> Callable[[], Any]:
    """What precedes a round's first level: FED committed rows through the layer, and the last one's head."""
    assert drafter.eagle is not None
    x = inputs(params, drafter.eagle, context, FED, batch)
    return partial(decode.jit_call, partial(opening, drafter, x.tree), params, x.state, x.pairs, x.start)


class Inputs(NamedTuple):
    """Random inputs of the parts: a drafter behind `context` committed rows, a frontier, and rows to feed."""

    tree: TreeSpec
    state: EagleState
    carry: Branches
    frontier: Frontier
    pairs: Commit
    start: jax.Array


def inputs(params: Any, spec: EagleSpec, context: int, n: int, batch: int) -> Inputs:
    assert spec.layer is not None
    D, dtype = spec.layer.hidden_size, params["embed"].dtype
    state = filled(params, spec, context, batch)
    output = normal(1, (batch, n, D), dtype)
    own = jnp.broadcast_to(jnp.arange(2 * n) == jnp.arange(n)[:, None], (batch, n, 2 * n))
    tokens = jnp.broadcast_to(jnp.arange(1, n + 1, dtype=jnp.int32), (batch, n))
    width = len(spec.taps), params["fc"].shape[1] // max(len(spec.taps), 2)
    features = normal(2, (batch, n, *width), dtype)
    return Inputs(
        tree=TreeSpec("dynamic", depth=2, width=n, children=min(n, 8), nodes=2),
        state=state,
        carry=Branches(*eagle.empty_rows(spec, state, 2 * n), output),
        frontier=Frontier(tokens, tokens - 1, tokens, jnp.zeros((batch, n)), tokens > 0, jnp.int32(1), own),
        pairs=Commit(tokens, jnp.full(batch, n), features, output),
        start=jnp.full(batch, context - n),
    )


def filled(params: Any, spec: EagleSpec, context: int, batch: int) -> EagleState:
    """A drafter that has been fed `context` random rows, with room for no more."""
    empty = eagle.empty(params, spec, jnp.zeros((batch, context), jnp.int32), FED)
    k, v = (normal(i, empty.cache.k[0].shape, empty.output.dtype) for i in (3, 4))
    cache = KVCache((k,), (v,), jnp.full(batch, context))
    return replace(empty, cache=cache, output=empty.output + 1)


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Drawn by NumPy: JAX would compile a program for every shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def body(spec: EagleSpec, tree: TreeSpec, params, state, carry, frontier):
    return eagle.branch(params, spec, state, tree, carry, frontier)


def head(drafter: DrafterSpec, tree: TreeSpec, params, output):
    assert drafter.eagle is not None
    return eagle.candidates(drafter.eagle, drafter.retrieval, tree, params, output)


def feed(spec: EagleSpec, params, state, pairs, start):
    return eagle.feed(params, spec, state, pairs, start)


def level(drafter: DrafterSpec, tree: TreeSpec, params, state, carry, frontier):
    assert drafter.eagle is not None
    carry = body(drafter.eagle, tree, params, state, carry, frontier)
    return carry, head(drafter, tree, params, carry.output)


def opening(drafter: DrafterSpec, tree: TreeSpec, params, state, pairs, start):
    """The fed cache is not returned: it would be copied, where a round writes a few rows in place."""
    assert drafter.eagle is not None
    output = feed(drafter.eagle, params, state, pairs, start).output
    return output, head(drafter, tree, params, output)
