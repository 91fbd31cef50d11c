"""Prefill: the prompt through target and drafter in chunks of fixed size, so that one program serves every length."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from eagle4 import sampling
from eagle4.drafters.base import Drafter
from eagle4.specs import System
from eagle4.state import CHUNK, append
from eagle4.target import cache as kv
from eagle4.target import model as target
from eagle4.types import Commit, DecodeState, TargetOut


def prefill(
    system: System, drafter: Drafter, weights: Any, drafter_weights: Any, state: DecodeState
) -> DecodeState:
    """Run the prompts through target and drafter and commit each row's first token.

    The drafter is fed the prompt exactly as it is fed rounds: features of row i, the token at i + 1.
    """
    B = state.tokens.shape[0]
    D, A = system.model.hidden_size, len(system.taps)
    dtype = weights["embed"].dtype
    dstate = drafter.init(drafter_weights, state.tokens, state.length)
    last = (jnp.zeros((B, 1, A, D), dtype), jnp.zeros((B, 1, D), dtype))
    following = jnp.concatenate([state.tokens[:, 1:], jnp.zeros((B, 1), jnp.int32)], axis=1)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), (B, CHUNK, CHUNK))

    def chunk(i, carry):
        cache, dstate, last = carry
        start = i * CHUNK
        at = jnp.broadcast_to(start + jnp.arange(CHUNK, dtype=jnp.int32), (B, CHUNK))
        tokens = lax.dynamic_slice_in_dim(state.tokens, start, CHUNK, axis=1)
        out = target.forward(weights, system.model, tokens, at, causal, cache, system.taps)
        cache = kv.write(cache, out.k, out.v, jnp.clip(state.length - start, 0, CHUNK))
        seen = jnp.clip(state.length - 1 - start, 0, CHUNK)
        text = lax.dynamic_slice_in_dim(following, start, CHUNK, axis=1)
        starts = jnp.full(B, start, jnp.int32)
        dstate = drafter.commit(drafter_weights, dstate, Commit(text, seen, out.features, out.hidden), starts)
        return cache, dstate, keep_last(last, out, state.length - 1 - start)

    chunks = -(-jnp.max(state.length) // CHUNK)
    cache, dstate, last = lax.fori_loop(0, chunks, chunk, (state.cache, dstate, last))
    first = first_token(system, state, target.head(weights, last[1]))
    commit = Commit(first[:, None], jnp.ones(B, jnp.int32), *last)
    dstate = drafter.commit(drafter_weights, dstate, commit, state.length - 1)
    tokens, count, done = append(state, first[:, None], jnp.ones(B, jnp.int32))
    return replace(state, tokens=tokens, length=state.length + count, done=done, cache=cache, drafter=dstate)


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
    p = sampling.distribution(system.sampling, state, logits, drafted, own)[:, 0]
    if system.sampling.greedy:
        return sampling.first_argmax(p)
    return sampling.draw(p, sampling.uniforms_at(system.sampling, state.seed, state.length, 1)[:, 0, 1])


def shortfall(
    system: System,
    weights: Any,
    tokens: Int32[Array, "1 S"],
    prompt_length: Int32[Array, ""],
    length: Int32[Array, ""],
) -> Float[Array, " S"]:
    """How far each answer token's (penalised) logit lies below the best one, teacher-forced: 0 where it is the argmax.

    Entry i judges tokens[i] given tokens[:i]; entries of the prompt and at or beyond `length` are 0. Greedy output is
    right where this is 0, or within a stated gap where two logits tie. S is a multiple of the chunk.
    """
    S, spec = tokens.shape[1], system.model
    causal = jnp.tril(jnp.ones((1, CHUNK, CHUNK), bool))
    following = jnp.concatenate([tokens[:, 1:], jnp.zeros((1, 1), jnp.int32)], axis=1)

    def penalised(logits, start, given, answer):
        if not system.sampling.penalised:
            return logits
        # The chunk is a chain of drafts under its first token; only its answer tokens add to the counts.
        lengths = prompt_length[None], start[None] + 1
        return sampling.penalise(logits, system.sampling, tokens, *lengths, given, causal & answer[:, None])

    def chunk(i, carry):
        cache, gaps = carry
        start = i * CHUNK
        at = (start + jnp.arange(CHUNK, dtype=jnp.int32))[None]
        given = lax.dynamic_slice_in_dim(tokens, start, CHUNK, 1)
        out = target.apply(weights, spec, given, at, causal, cache)
        cache = kv.write(cache, out.k, out.v, jnp.full(1, CHUNK, jnp.int32))
        chosen = lax.dynamic_slice_in_dim(following, start, CHUNK, 1)
        scores = penalised(out.logits, start, given, at >= prompt_length)
        gap = jnp.max(scores, axis=2) - jnp.take_along_axis(scores, chosen[..., None], axis=2)[..., 0]
        return cache, lax.dynamic_update_slice_in_dim(gaps, gap, start, 1)

    start = (kv.allocate(spec, 1, S, weights["embed"].dtype), jnp.zeros((1, S)))
    _, gaps = lax.fori_loop(0, -(-length // CHUNK), chunk, start)
    gaps = jnp.roll(gaps[0], 1)
    place = jnp.arange(S)
    return jnp.where((place >= prompt_length) & (place < length), gaps, 0.0)
