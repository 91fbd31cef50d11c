"""The loop: prefill, then rounds of plan → draft → verify → commit, under jit.

Every method runs through the same functions; plain decoding is the method whose tree is the root alone. `generate`
is one compiled program with no host round trip. The phased form (`jit_draft`, `jit_verify`, `jit_commit`) jits the
same functions one by one, for timing and for notebooks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from eagle4 import sampling
from eagle4.drafters import DRAFTERS
from eagle4.drafters.base import Drafter
from eagle4.errors import BadInput
from eagle4.harness.costs import CostTable, round_ms
from eagle4.harness.policies import POLICIES
from eagle4.harness.policy import Policy
from eagle4.policy_spec import PolicySpec
from eagle4.prefill import prefill, shortfall
from eagle4.specs import System
from eagle4.state import allocate, append
from eagle4.target import cache as kv
from eagle4.target import model as target
from eagle4.tree.grow import Decide, crop
from eagle4.tree.topology import positions, used
from eagle4.types import Commit, DecodeState, Draft, Plan, RoundInfo, TargetOut, Verdict
from eagle4.verify import VERIFIERS


class Params(NamedTuple):
    """What every round reads: weights of the target and of the drafter, and the table that prices rounds; None where
    there is none."""

    target: Any
    drafter: Any = None
    costs: CostTable | None = None


class Checked(NamedTuple):
    """What verification leaves for commit: the verdict, its text and features, and the accepted cache rows."""

    verdict: Verdict
    commit: Commit
    k: tuple[Float[Array, "B G P1 E"], ...]
    v: tuple[Float[Array, "B G P1 E"], ...]
    rows: Int32[Array, ""]


@cache
def drafter_of(system: System) -> Drafter:
    """The drafter's functions; cached, because fresh functions would be fresh jit entries."""
    policy = policy_of(system)
    return DRAFTERS[system.drafter.name](system.drafter, system.tree, Decide(policy.extend, policy.budget))


@cache
def policy_of(system: System) -> Policy:
    """The policy's functions; they never read the spec's numbers, which live in the policy state."""
    return POLICIES[system.policy](PolicySpec(name=system.policy), system.tree)


def begin(
    system: System,
    params: Params,
    policy: PolicySpec,
    tokens: np.ndarray,
    length: np.ndarray,
    seed: np.ndarray,
    max_new_tokens: int | np.ndarray,
    capacity: int,
    stop_ids: tuple[int, ...] = (),
) -> DecodeState:
    """Host side of a generation: allocate, refuse what does not fit, and prefill."""
    rule = POLICIES[policy.name](policy, system.tree)
    if rule.priced and params.costs is None:
        raise BadInput(f"policy {policy.name!r} needs a cost table; measure one with experiments.calibrate")
    dtype = params.target["embed"].dtype
    state = allocate(system, tokens, length, seed, max_new_tokens, capacity, dtype, stop_ids)
    return jit_start(system, params, replace(state, policy=rule.init()))


def start(system: System, params: Params, state: DecodeState) -> DecodeState:
    """Prefill target and drafter, and commit the first token."""
    return prefill(system, drafter_of(system), params.target, params.drafter, state)


def plan(system: System, params: Params, state: DecodeState) -> Plan:
    """How much to speculate this round; decided before anything of this round is drawn.

    Attention reads every slot of the cache, filled or not, so these are the context that is paid for.
    """
    return policy_of(system).plan(state.policy, params.costs, ~state.done, state.tokens.shape[1])


def draft(system: System, params: Params, state: DecodeState, plan: Plan) -> tuple[Draft, Any]:
    """The drafter's tree of guesses, and its state."""
    with jax.named_scope("draft"):
        root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
        keys = sampling.request_keys(system.sampling, state.seed, state.length, sampling.DRAFT)
        return drafter_of(system).propose(params.drafter, state.drafter, root, plan, keys)


def verify(system: System, params: Params, state: DecodeState, guesses: Draft) -> Checked:
    """One target pass over the tree, in the smallest compiled row count that holds every active row's nodes."""
    size = guesses.tokens.shape[1]
    row_counts = [*(n for n in system.tree.row_counts() if n < size), size]
    N = jnp.arange(size)
    rows = 1 + jnp.max(jnp.where(guesses.candidate & ~state.done[:, None], N, 0))
    bucket = jnp.searchsorted(jnp.array(row_counts), rows)
    with jax.named_scope("verify"):
        branches = [partial(verify_rows, system, n) for n in row_counts]
        return lax.switch(bucket, branches, params.target, state, guesses)


def verify_rows(system: System, n: int, weights: Any, state: DecodeState, guesses: Draft) -> Checked:
    """Verify the first n nodes: forward, accept, and gather the accepted path's rows."""
    guesses = crop(guesses, n)
    # Whatever a drafter leaves in an unused slot: an id outside the vocabulary would embed as NaN, and spoil the rest.
    guesses = replace(guesses, tokens=jnp.where(used(guesses.parent), guesses.tokens, 0))
    P = system.tree.depth
    at = positions(state.length - 1, guesses.depth)
    out = target.apply(weights, system.model, guesses.tokens, at, guesses.attend, state.cache, system.taps)
    p = sampling.distribution(system.sampling, state, out.logits, guesses.tokens, guesses.attend)
    u = (
        None
        if system.sampling.greedy
        else sampling.uniforms_at(system.sampling, state.seed, state.length, P + 1)
    )
    verdict = accept(system, p, guesses, u)
    nodes = jnp.concatenate([jnp.zeros_like(verdict.next_token)[:, None], verdict.path], axis=1)
    return Checked(
        verdict=verdict,
        commit=commit_of(guesses, verdict, out, nodes),
        k=tuple(kv.gather_path(k, nodes) for k in out.k),
        v=tuple(kv.gather_path(v, nodes) for v in out.v),
        rows=jnp.int32(n),
    )


def accept(system: System, p: Float[Array, "B N V"], guesses: Draft, uniforms: Array | None) -> Verdict:
    """The verifier's choice of a path, given the target's distribution after each node."""
    return VERIFIERS[system.verifier].verify(p, guesses, uniforms, system.tree.depth, system.tree.children)


def commit_of(guesses: Draft, verdict: Verdict, out: TargetOut, nodes: Int32[Array, "B P1"]) -> Commit:
    """The accepted tokens followed by the target's own, with the features of the nodes they follow."""
    B, P = verdict.path.shape
    at = jnp.maximum(nodes, 0)
    accepted = jnp.take_along_axis(guesses.tokens, at, axis=1)
    shifted = jnp.concatenate([accepted[:, 1:], jnp.zeros((B, 1), jnp.int32)], axis=1)
    own = jnp.arange(P + 1) == verdict.num_accepted[:, None]
    real = nodes >= 0
    return Commit(
        tokens=jnp.where(own, verdict.next_token[:, None], shifted),
        num_committed=verdict.num_accepted + 1,
        features=jnp.where(
            real[..., None, None], jnp.take_along_axis(out.features, at[..., None, None], axis=1), 0
        ),
        hidden=jnp.where(real[..., None], jnp.take_along_axis(out.hidden, at[..., None], axis=1), 0),
    )


def commit(
    system: System,
    params: Params,
    state: DecodeState,
    plan: Plan,
    guesses: Draft,
    dstate: Any,
    checked: Checked,
) -> tuple[DecodeState, RoundInfo]:
    """Crop at stop tokens and the length limit, then write what is left to text, cache, drafter and policy."""
    with jax.named_scope("commit"):
        tokens, count, done = append(state, checked.commit.tokens, checked.commit.num_committed)
        cropped = replace(checked.commit, num_committed=count)
        info = report(system, params, state, guesses, checked, count)
        new = replace(
            state,
            tokens=tokens,
            length=state.length + count,
            done=done,
            cache=kv.write(state.cache, checked.k, checked.v, count),
            drafter=drafter_of(system).commit(params.drafter, dstate, cropped, state.length - 1),
            policy=policy_of(system).update(state.policy, plan, info),
        )
        return new, info


def report(
    system: System, params: Params, state: DecodeState, guesses: Draft, checked: Checked, count: Array
) -> RoundInfo:
    """What happened in a round, for people and for the policy."""
    active = ~state.done
    path, N = checked.verdict.path, guesses.tokens.shape[1]
    levels = jnp.int32(0) if guesses.levels is None else guesses.levels
    predicted = jnp.float32(jnp.nan)
    if params.costs is not None:
        place = jnp.maximum(active.sum(), 1), state.tokens.shape[1], system.tree.width
        predicted = round_ms(params.costs, *place, levels, checked.rows)
    return RoundInfo(
        active=active,
        drafted_depth=jnp.where(active, jnp.max(jnp.where(guesses.candidate, guesses.depth, 0), axis=1), 0),
        drafted_nodes=jnp.where(active, jnp.sum(guesses.candidate, axis=1, dtype=jnp.int32), 0),
        verified_nodes=checked.rows,
        num_accepted=jnp.where(active, checked.verdict.num_accepted, 0),
        num_committed=count,
        levels=levels,
        score=jnp.where(guesses.candidate, guesses.score, -jnp.inf),
        depth=guesses.depth,
        taken=(path[:, :, None] == jnp.arange(N)).any(1) & active[:, None],
        predicted_ms=predicted,
    )


def one_round(system: System, params: Params, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
    """plan → draft → verify → commit."""
    planned = plan(system, params, state)
    guesses, dstate = draft(system, params, state, planned)
    checked = verify(system, params, state, guesses)
    return commit(system, params, state, planned, guesses, dstate, checked)


def rounds(
    system: System, params: Params, state: DecodeState, most: int
) -> tuple[DecodeState, RoundInfo, Int32[Array, ""]]:
    """At most `most` rounds (static), or until every row is done: final state, RoundInfo [most, …], rounds run."""
    shapes = jax.eval_shape(partial(one_round, system), params, state)[1]
    empty = jax.tree.map(lambda a: jnp.zeros((most, *a.shape), a.dtype), shapes)

    def more(carry):
        state, _, i = carry
        return (i < most) & ~jnp.all(state.done)

    def step(carry):
        state, history, i = carry
        state, info = one_round(system, params, state)
        history = jax.tree.map(lambda all_, one: all_.at[i].set(one), history, info)
        return state, history, i + 1

    return lax.while_loop(more, step, (state, empty, jnp.int32(0)))


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """A pure function of arrays, for timings of a part: `function` is hashable, so that it compiles once."""
    return function(*arguments)


jit_call = jax.jit(call, static_argnames="function")
jit_start = jax.jit(start, static_argnames="system", donate_argnames="state")
generate = jax.jit(rounds, static_argnames=("system", "most"), donate_argnames="state")
jit_plan = jax.jit(plan, static_argnames="system")
jit_draft = jax.jit(draft, static_argnames="system")
jit_verify = jax.jit(verify, static_argnames="system")
jit_accept = jax.jit(accept, static_argnames="system")
jit_commit = jax.jit(commit, static_argnames="system", donate_argnames="state")
jit_forward = jax.jit(target.apply, static_argnames=("spec", "taps"))
jit_shortfall = jax.jit(shortfall, static_argnames="system")
