"""Draft on while the drafter believes in its best path (EAGLE-2's confidence, used as a stopping rule)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from eagle4.harness.policy import Policy, envelope
from eagle4.policy_spec import PolicySpec
from eagle4.specs import TreeSpec
from eagle4.types import Plan


class Confidence(NamedTuple):
    """Sizes, and the least path probability worth drafting under and worth verifying."""

    sizes: Plan
    threshold: Float[Array, ""]


class Doubt(NamedTuple):
    """The threshold as a log probability, and which rows still decode."""

    log_threshold: Float[Array, ""]
    active: Bool[Array, " B"]


def confidence(spec: PolicySpec, tree: TreeSpec) -> Policy:
    """Stop drafting once no path of any active row is as likely as `threshold`; verify only nodes that are.

    Costs play no part: this is the rule that `marginal` is compared with. At threshold 0 it is `fixed`.
    """

    def plan(state: Confidence, costs, active, context) -> Plan:
        del costs, context
        return state.sizes._replace(price=Doubt(jnp.log(state.threshold), active))

    def extend(plan: Plan, frontier, depth, scores, depths):
        del scores, depths
        best = jnp.max(jnp.where(plan.price.active, frontier.max(axis=1), -jnp.inf))
        return (depth < plan.depth) & (best >= plan.price.log_threshold)

    def budget(plan: Plan, scores, depth):
        del depth
        likely = (scores > -jnp.inf) & (scores >= plan.price.log_threshold) & plan.price.active[:, None]
        return jnp.minimum(plan.nodes, 1 + jnp.max(likely.sum(axis=1, dtype=jnp.int32)))

    return Policy(
        init=lambda: Confidence(envelope(spec, tree), jnp.float32(spec.threshold)),
        plan=plan,
        extend=extend,
        budget=budget,
        update=lambda state, plan, info: state,
    )
