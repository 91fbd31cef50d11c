"""Making a recording: decode plainly, and at every position draft the largest trees on the side.

The states that drafters and target go through are those of the loop itself (`eagle4.decode`), so a recorded tree is the
one a round would have drafted there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from eagle4 import decode, sampling
from eagle4.errors import BadInput
from eagle4.fingerprint import weights_digest
from eagle4.methods import Method
from eagle4.policy_spec import PolicySpec
from eagle4.recording import NODE_BYTES, NODE_FIELDS, Recorded, Trees, Variant, matches
from eagle4.specs import System, TreeSpec
from eagle4.target import model as target
from eagle4.text import pad
from eagle4.tree.grow import crop
from eagle4.tree.topology import positions, used
from eagle4.types import DecodeState, Draft, Plan


class Request(NamedTuple):
    """What is asked: prompt ids, and the seed that its draws are folded from."""

    prompt_id: str
    category: str
    ids: list[int]
    seed: int


def largest(method: Method, variant: Variant, depth: int) -> Method:
    """The method with the envelope of a variant's largest tree, and nothing left to decide."""
    nodes = 1 + variant.pool(depth)
    if nodes > 256:
        raise BadInput(
            f"{variant.name} at depth {depth} has {nodes} nodes, more than 256; record less depth or width"
        )
    kind = "chain" if variant.width == variant.children == 1 else "dynamic"
    tree = TreeSpec(kind, depth, variant.width, variant.children, nodes)
    system = replace(method.system, tree=tree, policy="fixed")
    return method._replace(system=system, policy=PolicySpec())


def identity(methods: Mapping[Variant, Method]) -> dict[str, Any]:
    """What a recording belongs to: the target's and each head's weights, and how tokens were drawn."""
    first = next(iter(methods.values()))
    heads = {v.head: weights_digest(m.params.drafter) for v, m in methods.items()}
    return {
        "target": weights_digest(first.params.target),
        "heads": heads,
        "sampling": asdict(first.system.sampling),
    }


def size_bytes(prompts: int, new: int, depth: int, variants: Sequence[Variant]) -> int:
    """At most so much, before compression."""
    return prompts * new * sum(v.pool(depth) * NODE_BYTES for v in variants)


def record(
    methods: Mapping[Variant, Method],
    requests: Sequence[Request],
    new: int,
    capacity: int,
    stop_ids: tuple[int, ...],
    probs: Sequence[str],
    told: Callable[[int], None] = lambda _: None,
) -> list[Recorded]:
    """Record a group of requests side by side, `new` tokens each at most; `told` hears of every position.

    `methods` are those of `largest`, of one network and one depth. Nodes of the heads in `probs` go through the target
    too.
    """
    first = next(iter(methods.values()))
    system, params, depth = first.system, first.params, first.system.tree.depth
    tokens, length = pad([r.ids for r in requests], 1)
    seeds = np.array([r.seed for r in requests], np.int32)
    state = decode.begin(system, params, first.policy, tokens, length, seeds, new + depth, capacity)
    nothing = Plan(*(jnp.int32(n) for n in (0, 1, 1, 1)))
    kept: dict[Variant, list[tuple[np.ndarray, ...]]] = {v: [] for v in methods}
    entropy: list[np.ndarray] = []
    for position in range(new + depth - 1):
        settled = state.drafter
        if position < new - 1:
            for v, method in methods.items():
                plan = Plan(*(jnp.int32(n) for n in (depth, v.width, v.children, 1 + v.pool(depth))))
                guesses, settled = decode.jit_draft(method.system, method.params, state, plan)
                prob, surprise = decode.jit_call(
                    examiner(method.system, v.head in probs), params.target, state, guesses
                )
                kept[v].append(nodes_of(guesses, prob))
            entropy.append(np.asarray(surprise))
        guesses, dstate = decode.jit_draft(system, params, state, nothing)
        dstate = settled if position < new - 1 else dstate
        checked = decode.jit_verify(system, params, state, guesses)
        state, _ = decode.jit_commit(system, params, state, nothing, guesses, dstate, checked)
        told(position)
        if all_said(state, stop_ids, depth):
            break
    return [answer_of(r, b, state, new, depth, stop_ids, kept, entropy) for b, r in enumerate(requests)]


@cache
def examiner(system: System, probs: bool) -> Callable[..., tuple[Array, Array]]:
    """(weights, state, draft) -> probability of every node's token after its parent [B, N], entropy after the root
    [B]. Without `probs` only the root goes through the target, and nodes get NaN."""

    def examine(
        weights: Any, state: DecodeState, guesses: Draft
    ) -> tuple[Float[Array, "B N"], Float[Array, " B"]]:
        rows = guesses if probs else crop(guesses, 1)
        tokens = jnp.where(used(rows.parent), rows.tokens, 0)
        at = positions(state.length - 1, rows.depth)
        out = target.apply(weights, system.model, tokens, at, rows.attend, state.cache)
        p = jax.nn.softmax(out.logits, axis=-1)
        if not system.sampling.greedy:
            p = sampling.distribution(system.sampling, state, out.logits, tokens, rows.attend)
        root = p[:, 0]
        surprise = -jnp.sum(jnp.where(root > 0, root * jnp.log(jnp.maximum(root, 1e-38)), 0), axis=-1)
        if not probs:
            return jnp.full(guesses.tokens.shape, jnp.nan), surprise
        above = jnp.maximum(rows.parent, 0)
        of_parent = jnp.take_along_axis(p, above[..., None], axis=1)
        return jnp.take_along_axis(of_parent, tokens[..., None], axis=2)[..., 0], surprise

    return examine


def nodes_of(guesses: Draft, prob: Array) -> tuple[np.ndarray, ...]:
    """Tokens, parents (nodes, root not counted), depth, score and probability of the drafted nodes [B, M]."""
    real = np.asarray(guesses.candidate)[:, 1:]
    score = np.where(real, np.asarray(guesses.score)[:, 1:], -np.inf)
    parent = np.where(real, np.asarray(guesses.parent)[:, 1:] - 1, -1)
    return (
        np.asarray(guesses.tokens)[:, 1:],
        parent,
        np.asarray(guesses.depth)[:, 1:],
        score,
        np.asarray(prob)[:, 1:],
    )


def all_said(state: DecodeState, stop_ids: tuple[int, ...], depth: int) -> bool:
    """Whether every row has come to a stop token and `depth` tokens beyond."""
    text, begun, ended = (np.asarray(a) for a in (state.tokens, state.prompt_length, state.length))
    return all(np.isin(row[a : b - depth], stop_ids).any() for row, a, b in zip(text, begun, ended))


def answer_of(
    request: Request,
    row: int,
    state: DecodeState,
    new: int,
    depth: int,
    stop_ids: tuple[int, ...],
    kept: Mapping[Variant, list[tuple[np.ndarray, ...]]],
    entropy: list[np.ndarray],
) -> Recorded:
    """One row of a finished group, cut where its answer ends."""
    begun, ended = int(state.prompt_length[row]), int(state.length[row])
    said = np.asarray(state.tokens)[row, begun:ended]
    stops = np.flatnonzero(np.isin(said[:new], stop_ids))
    length = int(stops[0]) + 1 if len(stops) else min(new, len(said))
    said = said[: length + depth]
    trees = {}
    for variant, positions_ in kept.items():
        columns = (
            [np.stack([p[field][row] for p in positions_[: length - 1]]) for field in range(5)]
            if length > 1
            else []
        )
        trees[variant.name] = variant_trees(variant, depth, columns, said)
    surprise = np.array([e[row] for e in entropy[: length - 1]], np.float32)
    return Recorded(request.prompt_id, request.category, begun, length, said, surprise, trees)


def variant_trees(variant: Variant, depth: int, columns: list[np.ndarray], said: np.ndarray) -> Trees:
    """Trees of one answer, with what the target went on to say marked in them."""
    if not columns:
        none = {f: np.zeros((0, variant.pool(depth)), kind) for f, (_, kind) in NODE_FIELDS.items()}
        return Trees(**none)
    tokens, parent, level, score, prob = columns
    rows = zip(tokens, parent, np.where(np.isfinite(score), level, 0), range(len(tokens)))
    match = np.stack([matches(t, a, d, said[i + 1 :].tolist()) for t, a, d, i in rows])
    return Trees(tokens, parent.astype(np.int16), level.astype(np.int8), score, match, prob)
