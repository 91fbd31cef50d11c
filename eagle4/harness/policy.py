"""Policies decide how much to speculate. All are pure and run inside the jitted loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from eagle4.harness.costs import CostTable
from eagle4.policy_spec import PolicySpec
from eagle4.specs import TreeSpec
from eagle4.tree.grow import Budget, Extend, planned, planned_nodes
from eagle4.types import Plan, RoundInfo


class Policy(NamedTuple):
    """Pure functions of one decision rule. A policy's numbers live in its state, as data: sweeping them compiles
    nothing, and the functions never read the spec.

    init:   () -> state.
    plan:   (state, costs, active [B], context) -> Plan, before the round: what may not depend on this round's draws.
            `context` is the number of cache slots that attention reads.
    extend, budget: what is decided while a tree grows, see `eagle4.tree.grow.Decide`.
    update: (state, Plan, RoundInfo) -> state.
    priced: whether it needs a cost table.

    Trees of draws ask neither extend nor budget, since scores depend on the draws there.
    """

    init: Callable[[], Any]
    plan: Callable[[Any, CostTable | None, Bool[Array, " B"], int], Plan]
    extend: Extend
    budget: Budget
    update: Callable[[Any, Plan, RoundInfo], Any]
    priced: bool = False


def envelope(spec: PolicySpec, tree: TreeSpec) -> Plan:
    """The spec's depth, width, children and nodes; 0 means the tree envelope's own value."""
    return Plan(
        depth=jnp.int32(spec.depth or tree.depth),
        width=jnp.int32(spec.width or tree.width),
        children=jnp.int32(spec.children or tree.children),
        nodes=jnp.int32(spec.nodes or tree.nodes),
    )


def fixed(spec: PolicySpec, tree: TreeSpec) -> Policy:
    """Always the same depth, width, children and node budget."""
    return Policy(
        init=lambda: envelope(spec, tree),
        plan=lambda state, costs, active, context: state,
        extend=planned,
        budget=planned_nodes,
        update=lambda state, plan, info: state,
    )
