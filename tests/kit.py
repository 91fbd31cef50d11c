"""Tiny models, an independent plain decoder in NumPy, and drafters whose luck is scripted."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle4 import decode
from eagle4.drafters import DRAFTERS, eagle_net
from eagle4.drafters.base import Drafter
from eagle4.nn.abstract import initialise
from eagle4.nn.attention import attention
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, SamplingSpec, System, TreeSpec
from eagle4.target import model as target
from eagle4.tree import topology
from eagle4.types import Draft, RoundInfo

TINY = ModelSpec("llama", 48, 32, 48, 2, 4, 2, 8, 512)


@cache
def tiny_params(spec: ModelSpec = TINY, seed: int = 0):
    """Random weights, sharpened so that greedy argmaxes have clear margins."""
    params = initialise(target.abstract(spec), jax.random.key(seed))
    return params | {"embed": params["embed"] * 4.0, "head": params["head"] * 4.0}


def eagle_weights(spec: EagleSpec, model: ModelSpec = TINY, seed: int = 0):
    """Random weights of a complete drafter spec, norms and biases too; a reduced head scores some ids, in order."""
    own = initialise(eagle_net.abstract(spec, model), jax.random.key(seed))
    leaves, structure = jax.tree.flatten(own)
    rng = np.random.default_rng(seed)
    own = structure.unflatten(
        [x + jnp.array(0.3 * rng.normal(size=x.shape), x.dtype) if x.ndim == 1 else x for x in leaves]
    )
    if 0 < spec.draft_vocab < model.vocab_size:
        ids = rng.choice(model.vocab_size, spec.draft_vocab, replace=False)
        own["draft_ids"] = jnp.array(np.sort(ids), jnp.int32)
    return own


def eagle_params(spec: EagleSpec, model: ModelSpec = TINY, seed: int = 0, target_seed: int = 0):
    """`eagle_weights` beside the embedding and head of `tiny_params(model, target_seed)`."""
    return eagle_net.borrow(eagle_weights(spec, model, seed), tiny_params(model, target_seed))


def fitted_eagle_params(spec: EagleSpec, model: ModelSpec = TINY, seed: int = 0, target_seed: int = 0):
    """`eagle_params` whose own head is fitted to the target's logits on a random text, so that guesses are often right.

    Least squares: the network below the head stays random, and sees the whole text whatever its window.
    """
    params, weights = eagle_params(spec, model, seed, target_seed), tiny_params(model, target_seed)
    text = jnp.array(prompts((240,), seed=seed, vocab=model.vocab_size), jnp.int32)
    at, causal = jnp.arange(240, dtype=jnp.int32)[None], jnp.tril(jnp.ones((1, 240, 240), bool))
    out = target.apply(weights, model, text, at, causal, None, spec.taps)
    state = eagle_net.fuse(params, spec, out.features, out.hidden)
    row = eagle_net.enter(params, spec, text[:, 1:], state[:, :-1], at[:, :-1])
    mixed = attention(row.q, (row.k, row.v), causal[:, 1:, 1:])
    output = eagle_net.scored(params, spec, eagle_net.leave(params, spec, row.residual, mixed))
    head = np.linalg.lstsq(np.asarray(output[0]), np.asarray(out.logits[0, 1:]), rcond=None)[0].T
    return params | {"head": jnp.array(head[params.get("draft_ids", slice(None))])}


def numpy_logits(params, spec: ModelSpec, ids) -> np.ndarray:
    """Logits [T, V] of a whole text in float64 NumPy: no cache, no JAX, one head at a time."""
    hidden = numpy_streams(params, spec, ids)[-1]
    return hidden @ np.asarray(params.get("head", params["embed"]), np.float64).T


def numpy_streams(params, spec: ModelSpec, ids) -> list[np.ndarray]:
    """The residual streams [T, D] before, between and after the layers (`hidden_states` 0..L), and the normed last."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    T, E = len(ids), spec.head_dim
    group = spec.num_heads // spec.num_kv_heads
    angle = np.arange(T)[:, None] * spec.rope.theta ** (-np.arange(0, E, 2) / E)
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x, g):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.rms_norm_eps) * g

    def turn(x):
        a, b = x[:, : E // 2], x[:, E // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["embed"][np.asarray(ids)]
    streams = [x]
    for layer in w["layers"]:
        h = norm(x, layer["attn_norm"])
        q, k, v = h @ layer["q"].T, h @ layer["k"].T, h @ layer["v"].T
        heads = []
        for i in range(spec.num_heads):
            g = i // group
            qi, ki, vi = q[:, i * E : (i + 1) * E], k[:, g * E : (g + 1) * E], v[:, g * E : (g + 1) * E]
            s = turn(qi) @ turn(ki).T / np.sqrt(E)
            s[np.triu_indices(T, 1)] = -np.inf
            a = np.exp(s - s.max(-1, keepdims=True))
            heads.append(a / a.sum(-1, keepdims=True) @ vi)
        x = x + np.concatenate(heads, -1) @ layer["o"].T
        h = norm(x, layer["mlp_norm"])
        gate = h @ layer["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"].T)) @ layer["down"].T
        streams.append(x)
    return [*streams, norm(x, w["norm"])]


def plain_greedy(params, spec: ModelSpec, prompt, new: int, stop_ids=()) -> list[int]:
    """Greedy continuation by re-running the whole text for every token."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(np.argmax(numpy_logits(params, spec, ids)[-1])))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def prompts(lengths=(5,), seed=0, vocab=TINY.vocab_size) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def padded(texts) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, texts))
    tokens = np.zeros((len(texts), width), np.int32)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = text
    return tokens, np.array([len(t) for t in texts], np.int32)


def begin(system, params, texts, new, seeds=None, capacity=192, policy=None, stop_ids=()):
    tokens, length = padded(texts)
    seeds = np.arange(len(texts)) if seeds is None else seeds
    return decode.begin(
        system, params, policy or PolicySpec(), tokens, length, seeds, new, capacity, stop_ids
    )


def run(system, params, texts, new, most=None, **kw):
    """Answers (lists of ids), final state, RoundInfo history cut to the rounds that ran."""
    state = begin(system, params, texts, new, **kw)
    state, history, count = decode.generate(system, params, state, most or new)
    history = jax.tree.map(lambda a: np.asarray(a)[: int(count)], history)
    return answers(state), state, history


def answers(state) -> list[list[int]]:
    tokens = np.asarray(state.tokens)
    return [
        tokens[i, start:end].tolist()
        for i, (start, end) in enumerate(zip(np.asarray(state.prompt_length), np.asarray(state.length)))
    ]


@struct.dataclass
class ScriptState:
    length: jax.Array
    round: jax.Array


def scripted(spec: DrafterSpec, tree: TreeSpec, decide) -> Drafter:
    """A chain that is right for `right[round]` tokens and wrong after. params: truth [B, S], right [R], vocab."""

    def propose(params, state, root, plan, keys):
        B, D = root.shape[0], tree.depth
        at = jnp.minimum(state.length[:, None] + jnp.arange(D), params["truth"].shape[1] - 1)
        true = jnp.take_along_axis(params["truth"], at, axis=1)
        right = params["right"][jnp.minimum(state.round, len(params["right"]) - 1)]
        guess = jnp.where(jnp.arange(D) < right, true, (true + 1) % params["vocab"])
        parent = jnp.broadcast_to(jnp.arange(D + 1, dtype=jnp.int32) - 1, (B, D + 1))
        used = jnp.arange(D + 1) <= plan.depth
        parent = jnp.where(used, parent, -1)
        draft = Draft(
            tokens=jnp.concatenate([root[:, None], guess], axis=1),
            parent=parent,
            depth=topology.depths(parent),
            attend=topology.ancestors(parent),
            candidate=jnp.broadcast_to(used & (jnp.arange(D + 1) > 0), (B, D + 1)),
            score=jnp.zeros((B, D + 1)),
            q=None,
        )
        return draft, replace(state, round=state.round + 1)

    def commit(params, state, commit, start):
        length = start + 1 + commit.num_committed
        return replace(state, length=jnp.where(commit.num_committed > 0, length, state.length))

    return Drafter(lambda p, tokens, length: ScriptState(length, jnp.int32(0)), propose, commit)


DRAFTERS["scripted"] = scripted


def round_info(**known) -> RoundInfo:
    """A history of rounds [R, B] in which only the given columns matter."""
    R, B = np.shape(known["num_accepted"])
    rest = {
        "levels": np.zeros(R, np.int32),
        "score": np.full((R, B, 1), -np.inf),
        "depth": np.zeros((R, B, 1), np.int32),
        "taken": np.zeros((R, B, 1), bool),
        "predicted_ms": np.full(R, np.nan),
    }
    return RoundInfo(**rest | known)


def truth_table(texts, continuations, width=192) -> jax.Array:
    rows = [(list(t) + list(c) + [0] * width)[:width] for t, c in zip(texts, continuations)]
    return jnp.array(rows, jnp.int32)


def chain_system(
    name: str, depth: int = 4, temperature: float = 0.0, model: ModelSpec = TINY, **kw
) -> System:
    """A system whose draft is a chain (the root alone for `none`)."""
    tree = (
        TreeSpec(depth=0, nodes=1)
        if name == "none"
        else TreeSpec(depth=depth, nodes=depth + 1, buckets=(1, depth + 1))
    )
    sampling = kw.pop("sampling", SamplingSpec(temperature=temperature))
    verifier = "greedy" if sampling.greedy else "point_mass"
    return System(
        model,
        DrafterSpec(name=name, min_ngram=1, max_ngram=3),
        tree,
        verifier=verifier,
        sampling=sampling,
        **kw,
    )
