"""Policies decide how much to speculate. All are pure and run inside the jitted loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.specs import PolicySpec, TreeSpec
from eagle4.types import Plan, RoundInfo


class Policy(NamedTuple):
    """Pure functions of one decision rule.

    init:   () -> state.
    plan:   state -> Plan, before the round: what may not depend on this round's draws.
    extend: (Plan, frontier scores [B, W], depth) -> bool, before each draft step: is one more level worth it?
    update: (state, RoundInfo) -> state.
    """

    init: Callable[[], Any]
    plan: Callable[[Any], Plan]
    extend: Callable[[Plan, Float[Array, "B W"], Int32[Array, ""]], Bool[Array, ""]]
    update: Callable[[Any, RoundInfo], Any]


def fixed(spec: PolicySpec, tree: TreeSpec) -> Policy:
    """Always the same depth, width, children and node budget; 0 in the spec means the envelope's own value.

    The numbers live in the state, as data, so every setting inside one envelope runs the same compiled program.
    """

    def init() -> Plan:
        return Plan(
            depth=jnp.int32(spec.depth or tree.depth),
            width=jnp.int32(spec.width or tree.width),
            children=jnp.int32(spec.children or tree.children),
            nodes=jnp.int32(spec.nodes or tree.nodes),
        )

    return Policy(
        init=init,
        plan=lambda state: state,
        extend=lambda plan, scores, depth: depth < plan.depth,
        update=lambda state, info: state,
    )


POLICIES = {"fixed": fixed}
