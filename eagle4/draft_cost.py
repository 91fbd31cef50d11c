"""What a draft step of an EAGLE network costs, body and head apart, as shares of a plain decode step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from eagle4 import decode
from eagle4.drafters import eagle
from eagle4.drafters.eagle import Branches, EagleState
from eagle4.errors import BadInput
from eagle4.forward_cost import WARMUP, Tell, check_positions, forward_calls
from eagle4.harness.clock import interleaved, median, spread
from eagle4.methods import Method
from eagle4.specs import DrafterSpec, EagleSpec, TreeSpec
from eagle4.target.load import Checkpoint
from eagle4.tree.grow import Frontier
from eagle4.types import Commit, KVCache


def draft_times(
    model: Checkpoint, method: Method, context: int, rows: list[int], repeats: int, tell: Tell
) -> list[dict[str, Any]]:
    """Median ms of a plain decode step and, for each number of rows, of the drafter's three parts.

    body: the layer over a frontier of so many rows, behind `context` committed ones. head: logits of so many rows and
    their likeliest tokens. feed: the layer over so many committed rows, as after a round. All are timed in turn.
    """
    if method.system.drafter.eagle is None:
        raise BadInput(
            f"method {method.name!r} drafts without a network; use eagle1, eagle2, eagle3 or eagle3_1"
        )
    check_positions(model.spec, context, max(rows))
    calls: dict[tuple[str, int], Callable[[], Any]] = {
        ("plain decode step", 1): forward_calls(model, 1, context, [1])[1]
    }
    for n in rows:
        calls |= {
            (what, n): call
            for what, call in parts(method.params.drafter, method.system.drafter, context, n).items()
        }
    seconds = interleaved(calls, repeats, WARMUP, progress=tell)
    step = median(seconds["plain decode step", 1])
    return [
        {"what": what, "rows": n, "ms": 1e3 * median(s), "spread": spread(s), "share": median(s) / step}
        for (what, n), s in seconds.items()
    ]


def parts(params: Any, drafter: DrafterSpec, context: int, n: int) -> dict[str, Callable[[], Any]]:
    """The three parts with n rows, compiled when first called."""
    spec = drafter.eagle
    assert spec is not None and spec.layer is not None  # noqa: PT018
    D, dtype = spec.layer.hidden_size, params["embed"].dtype
    tree = TreeSpec("dynamic", depth=2, width=n, children=min(n, 8), nodes=2)
    state = filled(params, spec, context)
    output = jax.random.normal(jax.random.key(1), (1, n, D), dtype)
    carry = Branches(*eagle.empty_rows(spec, state, 2 * n), output)
    own = jnp.arange(2 * n) == jnp.arange(n)[:, None]
    tokens = jnp.arange(1, n + 1, dtype=jnp.int32)[None]
    frontier = Frontier(tokens, tokens - 1, tokens, jnp.zeros((1, n)), tokens > 0, jnp.int32(1), own[None])
    width = len(spec.taps), params["fc"].shape[1] // max(len(spec.taps), 2)
    features = jax.random.normal(jax.random.key(2), (1, n, *width), dtype)
    pairs = Commit(tokens, jnp.array([n]), features, output)
    start = jnp.array([context - n])
    return {
        "body": partial(decode.jit_call, partial(body, spec, tree), params, state, carry, frontier),
        "head": partial(decode.jit_call, partial(head, drafter, tree), params, output),
        "feed": partial(decode.jit_call, partial(feed, spec), params, state, pairs, start),
    }


def filled(params: Any, spec: EagleSpec, context: int) -> EagleState:
    """A drafter that has been fed `context` random rows."""
    empty = eagle.empty(params, spec, jnp.zeros((1, context), jnp.int32))
    k, v = (jax.random.normal(jax.random.key(i), empty.cache.k[0].shape, empty.output.dtype) for i in (3, 4))
    return EagleState(KVCache((k,), (v,), jnp.array([context])), empty.output + 1)


def body(spec: EagleSpec, tree: TreeSpec, params, state, carry, frontier):
    return eagle.branch(params, spec, state, tree, carry, frontier)


def head(drafter: DrafterSpec, tree: TreeSpec, params, output):
    assert drafter.eagle is not None
    return eagle.candidates(drafter.eagle, drafter.retrieval, tree, params, output)


def feed(spec: EagleSpec, params, state, pairs, start):
    return eagle.feed(params, spec, state, pairs, start)
