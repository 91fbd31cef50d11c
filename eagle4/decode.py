"""The loop: prefill, then rounds of plan → draft → verify → commit, under jit.

Every method runs through the same functions; plain decoding is the method whose tree is the root alone. `generate`
is one compiled program with no host round trip. The phased form (`jit_draft`, `jit_verify`, `jit_commit`) jits the
same functions one by one, for timing and for notebooks.
"""

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
from eagle4.harness.policy import POLICIES, Policy
from eagle4.specs import PolicySpec, System
from eagle4.target import cache as kv
from eagle4.target import model as target
from eagle4.tree.topology import positions
from eagle4.types import Commit, DecodeState, Draft, KVCache, Plan, RoundInfo, TargetOut, Verdict
from eagle4.verify import VERIFIERS

CHUNK = 64


class Params(NamedTuple):
    """Weights of the target and of the drafter (None where it has none)."""

    target: Any
    drafter: Any = None


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
    return DRAFTERS[system.drafter.name](system.drafter, system.tree, policy_of(system).extend)


@cache
def policy_of(system: System) -> Policy:
    """The policy's functions; they never read the spec's numbers, which live in the policy state."""
    return POLICIES[system.policy](PolicySpec(name=system.policy), system.tree)


def request_keys(system: System, seed: Int32[Array, " B"], position: Int32[Array, "B ..."]) -> Array:
    """A key per row and position, folded from (experiment, request, position): neighbours and batch size change
    nothing."""
    base = jax.random.key(system.sampling.seed)

    def key(s, p):
        return jax.random.fold_in(jax.random.fold_in(base, s), p)

    return jnp.vectorize(key)(seed.reshape(-1, *[1] * (position.ndim - 1)), position)


def uniforms_at(system: System, seed: Int32[Array, " B"], start: Int32[Array, " B"], levels: int) -> Array:
    """Uniforms [B, levels, 2] for the tokens at positions start, start + 1, …: acceptance and final draw."""
    keys = request_keys(system, seed, start[:, None] + jnp.arange(levels))
    return jnp.vectorize(lambda key: jax.random.uniform(key, (2,)), signature="()->(u)")(keys)


def check_room(system: System, prompt_length: int, max_new_tokens: int, capacity: int) -> None:
    """Refuse, on the host, a buffer in which the last round's tree would not fit."""
    need = room(system, prompt_length, max_new_tokens)
    if capacity < need:
        raise BadInput(
            f"a prompt of {prompt_length} tokens with max_new_tokens={max_new_tokens} and a tree {system.tree.depth} "
            f"deep needs {need} cache slots, but only {capacity} were allocated; raise the capacity"
        )
    if prompt_length + max_new_tokens > system.model.max_position:
        raise BadInput(
            f"prompt of {prompt_length} tokens + max_new_tokens={max_new_tokens} exceeds the model's context of "
            f"{system.model.max_position} positions; shorten the prompt or lower max_new_tokens"
        )


def room(system: System, prompt_length: int, max_new_tokens: int) -> int:
    """Slots a row needs: prompt in whole chunks, answer, and one uncropped path beyond it."""
    chunks = -(-prompt_length // CHUNK) * CHUNK
    return max(chunks, prompt_length + max_new_tokens + system.tree.depth + 1)


def begin(
    system: System, params: Params, policy: PolicySpec, tokens: np.ndarray, length: np.ndarray, seed: np.ndarray,
    max_new_tokens: int, capacity: int, stop_ids: tuple[int, ...] = (),
) -> DecodeState:
    """Host side of a generation: check the room, allocate, and prefill. tokens [B, T] right-padded, length [B]."""
    if len(tokens) == 0 or int(np.min(length)) < 1:
        raise BadInput("an empty prompt cannot be decoded; give at least one token")
    check_room(system, int(np.max(length)), max_new_tokens, capacity)
    B = len(tokens)
    padded = np.zeros((B, capacity), np.int32)
    width = min(tokens.shape[1], capacity)
    padded[:, :width] = tokens[:, :width]
    state = DecodeState(
        tokens=jnp.asarray(padded),
        length=jnp.array(length, jnp.int32),
        prompt_length=jnp.array(length, jnp.int32),
        limit=jnp.array(length + max_new_tokens, jnp.int32),
        stop_ids=jnp.array(stop_ids, jnp.int32),
        done=jnp.zeros(B, bool),
        seed=jnp.array(seed, jnp.int32),
        cache=kv.allocate(system.model, B, capacity, params.target["embed"].dtype),
        drafter=(),
        policy=POLICIES[policy.name](policy, system.tree).init(),
    )
    return jit_prefill(system, params, state)


def prefill(system: System, params: Params, state: DecodeState) -> DecodeState:
    """Run the prompt through target and drafter in chunks of fixed size, and commit the first token.

    Chunks make one program serve every prompt length. The drafter is fed the prompt exactly as it is fed rounds.
    """
    drafter = drafter_of(system)
    B, S = state.tokens.shape
    D, A = system.model.hidden_size, len(system.taps)
    dtype = params.target["embed"].dtype
    dstate = drafter.init(params.drafter, state.tokens, state.length)
    last = (jnp.zeros((B, 1, A, D), dtype), jnp.zeros((B, 1, D), dtype))
    following = jnp.concatenate([state.tokens[:, 1:], jnp.zeros((B, 1), jnp.int32)], axis=1)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (B, CHUNK, CHUNK))

    def chunk(i, carry):
        cache, dstate, last = carry
        start = i * CHUNK
        at = jnp.broadcast_to(start + jnp.arange(CHUNK, dtype=jnp.int32), (B, CHUNK))
        tokens = lax.dynamic_slice_in_dim(state.tokens, start, CHUNK, axis=1)
        out = target.forward(params.target, system.model, tokens, at, causal, cache, system.taps)
        cache = kv.write(cache, out.k, out.v, jnp.clip(state.length - start, 0, CHUNK))
        seen = jnp.clip(state.length - 1 - start, 0, CHUNK)
        text = lax.dynamic_slice_in_dim(following, start, CHUNK, axis=1)
        starts = jnp.full(B, start, jnp.int32)
        dstate = drafter.commit(params.drafter, dstate, Commit(text, seen, out.features, out.hidden), starts)
        return cache, dstate, keep_last(last, out, state.length - 1 - start)

    chunks = -(-jnp.max(state.length) // CHUNK)
    cache, dstate, last = lax.fori_loop(0, chunks, chunk, (state.cache, dstate, last))
    first = first_token(system, state, target.head(params.target, last[1]))
    commit = Commit(first[:, None], jnp.ones(B, jnp.int32), *last)
    dstate = drafter.commit(params.drafter, dstate, commit, state.length - 1)
    tokens, count, done = append(state, first[:, None], jnp.ones(B, jnp.int32))
    return state.replace(tokens=tokens, length=state.length + count, done=done, cache=cache, drafter=dstate)


def keep_last(last: tuple[Array, Array], out: TargetOut, row: Int32[Array, " B"]) -> tuple[Array, Array]:
    """Features and hidden of the prompt's last token once its chunk has come (0 ≤ row < chunk)."""
    here = (row >= 0) & (row < out.hidden.shape[1])
    at = jnp.clip(row, 0, out.hidden.shape[1] - 1)[:, None]
    features = jnp.take_along_axis(out.features, at[..., None, None], axis=1)
    hidden = jnp.take_along_axis(out.hidden, at[..., None], axis=1)
    return (
        jnp.where(here[:, None, None, None], features, last[0]),
        jnp.where(here[:, None, None], hidden, last[1]),
    )


def first_token(system: System, state: DecodeState, logits: Float[Array, "B 1 V"]) -> Int32[Array, " B"]:
    """The target's own token after the prompt: greedy, or drawn with the final-draw uniform of its position."""
    own = jnp.ones((state.tokens.shape[0], 1, 1), bool)
    drafted = jnp.zeros((state.tokens.shape[0], 1), jnp.int32)
    p = distribution(system, state, logits, drafted, own)[:, 0]
    if system.sampling.greedy:
        return sampling.first_argmax(p)
    return sampling.draw(p, uniforms_at(system, state.seed, state.length, 1)[:, 0, 1])


def distribution(system: System, state: DecodeState, logits: Array, drafted: Array, attend: Array) -> Array:
    """The target's processed distribution after each node; at temperature 0 (penalised) logits, to be compared."""
    if system.sampling.penalised:
        logits = sampling.penalise(
            logits, system.sampling, state.tokens, state.prompt_length, state.length, drafted, attend
        )
    return logits if system.sampling.greedy else sampling.probabilities(logits, system.sampling)


def plan(system: System, state: DecodeState) -> Plan:
    """How much to speculate this round; decided before anything of this round is drawn."""
    return policy_of(system).plan(state.policy)


def draft(system: System, params: Params, state: DecodeState, plan: Plan) -> tuple[Draft, Any]:
    """The drafter's tree of guesses, and its state."""
    with jax.named_scope("draft"):
        root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
        keys = jax.vmap(partial(jax.random.fold_in, data=1))(request_keys(system, state.seed, state.length))
        return drafter_of(system).propose(params.drafter, state.drafter, root, plan, keys)


def verify(system: System, params: Params, state: DecodeState, guesses: Draft) -> Checked:
    """One target pass over the tree, in the smallest compiled row count that holds every active row's nodes."""
    row_counts = [n for n in system.tree.row_counts() if n <= guesses.tokens.shape[1]]
    N = jnp.arange(guesses.tokens.shape[1])
    used = 1 + jnp.max(jnp.where(guesses.candidate & ~state.done[:, None], N, 0))
    bucket = jnp.searchsorted(jnp.array(row_counts), used)
    with jax.named_scope("verify"):
        branches = [partial(verify_rows, system, n) for n in row_counts]
        return lax.switch(bucket, branches, params.target, state, guesses)


def verify_rows(system: System, n: int, weights: Any, state: DecodeState, guesses: Draft) -> Checked:
    """Verify the first n nodes: forward, accept, and gather the accepted path's rows."""
    guesses = first_nodes(guesses, n)
    P = system.tree.depth
    at = positions(state.length - 1, guesses.depth)
    out = target.apply(weights, system.model, guesses.tokens, at, guesses.attend, state.cache, system.taps)
    p = distribution(system, state, out.logits, guesses.tokens, guesses.attend)
    u = None if system.sampling.greedy else uniforms_at(system, state.seed, state.length, P + 1)
    verdict = VERIFIERS[system.verifier].verify(p, guesses, u, P, system.tree.children)
    nodes = jnp.concatenate([jnp.zeros_like(verdict.next_token)[:, None], verdict.path], axis=1)
    return Checked(
        verdict=verdict,
        commit=commit_of(guesses, verdict, out, nodes),
        k=tuple(kv.gather_path(k, nodes) for k in out.k),
        v=tuple(kv.gather_path(v, nodes) for v in out.v),
        rows=jnp.int32(n),
    )


def first_nodes(guesses: Draft, n: int) -> Draft:
    """The first n slots of the tree; the caller knows that the rest is unused."""
    q = guesses.q
    return Draft(
        tokens=guesses.tokens[:, :n],
        parent=guesses.parent[:, :n],
        depth=guesses.depth[:, :n],
        attend=guesses.attend[:, :n, :n],
        candidate=guesses.candidate[:, :n],
        score=guesses.score[:, :n],
        q=None if q is None else q.replace(ids=q.ids[:, :n], probs=q.probs[:, :n]),
    )


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
    system: System, params: Params, state: DecodeState, guesses: Draft, dstate: Any, checked: Checked
) -> tuple[DecodeState, RoundInfo]:
    """Crop at stop tokens and the length limit, then write what is left to text, cache and drafter."""
    with jax.named_scope("commit"):
        tokens, count, done = append(state, checked.commit.tokens, checked.commit.num_committed)
        cropped = checked.commit.replace(num_committed=count)
        active = ~state.done
        accepted = jnp.where(active, checked.verdict.num_accepted, 0)
        info = RoundInfo(
            active=active,
            drafted_depth=jnp.where(active, jnp.max(jnp.where(guesses.candidate, guesses.depth, 0), axis=1), 0),
            drafted_nodes=jnp.where(active, jnp.sum(guesses.candidate, axis=1, dtype=jnp.int32), 0),
            verified_nodes=checked.rows,
            num_accepted=accepted,
            num_committed=count,
        )
        new = state.replace(
            tokens=tokens,
            length=state.length + count,
            done=done,
            cache=kv.write(state.cache, checked.k, checked.v, count),
            drafter=drafter_of(system).commit(params.drafter, dstate, cropped, state.length - 1),
            policy=policy_of(system).update(state.policy, info),
        )
        return new, info


def append(
    state: DecodeState, tokens: Int32[Array, "B P1"], count: Int32[Array, " B"]
) -> tuple[Int32[Array, "B S"], Int32[Array, " B"], Array]:
    """Text with the first `count` tokens appended, cropped after a stop token and at the limit; how many, and done."""
    P1 = tokens.shape[1]
    place = jnp.arange(P1)
    stop = jnp.isin(tokens, state.stop_ids) & (place < count[:, None])
    stopped = jnp.any(stop, axis=1)
    count = jnp.where(stopped, jnp.argmax(stop, axis=1).astype(jnp.int32) + 1, count)
    left = state.limit - state.length
    done = state.done | (stopped & (count <= left)) | (count >= left)
    count = jnp.where(state.done, 0, jnp.minimum(count, left))
    slot = jnp.where(place < count[:, None], state.length[:, None] + place, state.tokens.shape[1])
    rows = jnp.arange(len(tokens))[:, None]
    return state.tokens.at[rows, slot].set(tokens, mode="drop"), count, done


def one_round(system: System, params: Params, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
    """plan → draft → verify → commit."""
    guesses, dstate = draft(system, params, state, plan(system, state))
    checked = verify(system, params, state, guesses)
    return commit(system, params, state, guesses, dstate, checked)


def rounds(
    system: System, params: Params, state: DecodeState, most: int
) -> tuple[DecodeState, RoundInfo, Int32[Array, ""]]:
    """At most `most` rounds (static), or until every row is done: final state, RoundInfo [most, …], rounds run."""
    B = state.tokens.shape[0]
    empty = RoundInfo(
        active=jnp.zeros((most, B), bool),
        drafted_depth=jnp.zeros((most, B), jnp.int32),
        drafted_nodes=jnp.zeros((most, B), jnp.int32),
        verified_nodes=jnp.zeros(most, jnp.int32),
        num_accepted=jnp.zeros((most, B), jnp.int32),
        num_committed=jnp.zeros((most, B), jnp.int32),
    )

    def more(carry):
        state, _, i = carry
        return (i < most) & ~jnp.all(state.done)

    def step(carry):
        state, history, i = carry
        state, info = one_round(system, params, state)
        history = jax.tree.map(lambda all_, one: all_.at[i].set(one), history, info)
        return state, history, i + 1

    return lax.while_loop(more, step, (state, empty, jnp.int32(0)))


jit_prefill = jax.jit(prefill, static_argnames="system", donate_argnames="state")
generate = jax.jit(rounds, static_argnames=("system", "most"), donate_argnames="state")
jit_draft = jax.jit(draft, static_argnames="system")
jit_verify = jax.jit(verify, static_argnames="system")
jit_commit = jax.jit(commit, static_argnames="system", donate_argnames="state")
