"""From logits to the target's distribution p, and draws from given uniforms.

p is the *processed* distribution: penalties, temperature, then top-k, top-p and min-p. The same p is used in
acceptance and in the residual, so a token outside the nucleus is always rejected (pitfall A8).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from eagle4.specs import SamplingSpec
from eagle4.types import DecodeState


def draw(weights: Float[Array, "B V"], u: Float[Array, " B"]) -> Int32[Array, " B"]:
    """Inverse-CDF draw from unnormalised float32 weights, one uniform in [0, 1) per row.

    Never a token of zero weight, also where rounding makes the cumulative sum non-monotone or u · total reach the
    total: then the last positive one. Rows without any positive weight give 0.
    """
    cumulative = jnp.cumsum(weights, axis=-1)
    passed = (cumulative > u[:, None] * cumulative[:, -1:]) & (weights > 0)
    positive = weights > 0
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)
    return jnp.where(jnp.any(positive, axis=-1), index, 0).astype(jnp.int32)


def first_argmax(scores: Float[Array, "*T V"]) -> Int32[Array, "*T"]:
    """The lowest index of the maximum. Max, then first match: on the CPU several times faster than argmax."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(scores == top, index, scores.shape[-1] - 1), axis=-1)


def probabilities(logits: Float[Array, "*T V"], spec: SamplingSpec) -> Float[Array, "*T V"]:
    """softmax(logits / temperature) with top-k, top-p (Holtzman et al., arXiv 1904.09751) and min-p (arXiv
    2407.01082) applied in that order, in float32. The likeliest token always stays (pitfall A7).

    Only for temperature > 0; greedy decoding compares logits and needs no softmax.
    """
    scaled = logits.astype(jnp.float32) / spec.temperature
    if spec.top_k:
        scaled = jnp.where(scaled >= kth_largest(scaled, spec.top_k), scaled, -jnp.inf)
    p = jax.nn.softmax(scaled, axis=-1)
    if spec.top_p < 1:
        p = nucleus(p, spec.top_p)
    if spec.min_p > 0:
        p = jnp.where(p >= spec.min_p * jnp.max(p, axis=-1, keepdims=True), p, 0.0)
        p = p / jnp.sum(p, axis=-1, keepdims=True)
    return p


def kth_largest(scores: Float[Array, "*T V"], k: int) -> Float[Array, "*T 1"]:
    """The k-th largest score; tokens tied with it stay."""
    return lax.top_k(lax.optimization_barrier(scores), min(k, scores.shape[-1]))[0][..., -1:]


def nucleus(p: Float[Array, "*T V"], top_p: float) -> Float[Array, "*T V"]:
    """The smallest set of likeliest tokens with mass ≥ top_p, renormalised; tokens tied with its last one stay.

    The threshold is found by bisection on the probability: sorting a whole vocabulary is 50 times slower on a CPU.
    """
    high = jnp.max(p, axis=-1, keepdims=True)
    low = jnp.zeros_like(high)

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        enough = jnp.sum(jnp.where(p >= middle, p, 0.0), axis=-1, keepdims=True) >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = lax.fori_loop(0, 40, halve, (low, high))
    kept = jnp.where(p >= low, p, 0.0)
    return kept / jnp.sum(kept, axis=-1, keepdims=True)


def penalise(
    logits: Float[Array, "B N V"],
    spec: SamplingSpec,
    tokens: Int32[Array, "B S"],
    prompt_length: Int32[Array, " B"],
    length: Int32[Array, " B"],
    drafted: Int32[Array, "B N"],
    attend: Bool[Array, "B N N"],
) -> Float[Array, "B N V"]:
    """Repetition and frequency penalties of each node, counted over its prefix and its ancestors.

    `tokens[:, :length]` is the committed text including the root (node 0); node n adds the drafted tokens it attends
    to. Rejected nodes leave no trace because nothing is accumulated between rounds (pitfall A9).
    """
    B, N, V = logits.shape
    place = jnp.arange(tokens.shape[1])
    answer = (place >= prompt_length[:, None]) & (place < length[:, None])
    own = attend.at[:, :, 0].set(False)
    rows, nodes = jnp.arange(B)[:, None], jnp.arange(N)[None, :, None]
    answered = jnp.zeros((B, V), jnp.float32).at[rows, tokens].add(answer.astype(jnp.float32))
    prompted = jnp.zeros((B, V), bool).at[rows, tokens].max(place < prompt_length[:, None])
    path = jnp.zeros((B, N, V), jnp.float32)
    path = path.at[rows[..., None], nodes, drafted[:, None, :]].add(own.astype(jnp.float32))
    count = answered[:, None] + path
    seen = (count > 0) | prompted[:, None]
    rescaled = jnp.where(logits > 0, logits / spec.repetition_penalty, logits * spec.repetition_penalty)
    return jnp.where(seen, rescaled, logits) - spec.frequency_penalty * count


def distribution(
    spec: SamplingSpec, state: DecodeState, logits: Array, drafted: Array, attend: Array
) -> Array:
    """The target's processed distribution after each node; at temperature 0 (penalised) logits, to be compared."""
    if spec.penalised:
        logits = penalise(logits, spec, state.tokens, state.prompt_length, state.length, drafted, attend)
    return logits if spec.greedy else probabilities(logits, spec)


DRAFT, VERIFY = 0, 1  # streams of random numbers: what the drafter draws, and what verification draws


def request_keys(
    spec: SamplingSpec, seed: Int32[Array, " B"], position: Int32[Array, "B ..."], stream: int
) -> jax.Array:
    """A key per row and position, folded from (experiment, stream, request, position): neighbours and batch size
    change nothing."""
    base = jax.random.fold_in(jax.random.key(spec.seed), stream)

    def key(s, p):
        return jax.random.fold_in(jax.random.fold_in(base, s), p)

    return jnp.vectorize(key)(seed.reshape(-1, *[1] * (position.ndim - 1)), position)


def uniforms_at(
    spec: SamplingSpec, seed: Int32[Array, " B"], start: Int32[Array, " B"], levels: int
) -> Float[Array, "B L 2"]:
    """Uniforms [B, levels, 2] for the tokens at positions start, start + 1, …: acceptance and final draw."""
    keys = request_keys(spec, seed, start[:, None] + jnp.arange(levels), VERIFY)
    return jnp.vectorize(lambda key: jax.random.uniform(key, (2,)), signature="()->(u)")(keys)
