"""The state of a generation: how much room it needs, its allocation, and appending text to it."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from eagle4.errors import BadInput
from eagle4.specs import System
from eagle4.target import cache as kv
from eagle4.types import DecodeState

CHUNK = 64


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


def allocate(
    system: System,
    tokens: Int32[np.ndarray, "B T"],
    length: Int32[np.ndarray, " B"],
    seed: Int32[np.ndarray, " B"],
    max_new_tokens: int | Int32[np.ndarray, " B"],
    capacity: int,
    dtype: jnp.dtype,
    stop_ids: tuple[int, ...] = (),
) -> DecodeState:
    """A state that holds right-padded prompts and nothing else; drafter and policy are still empty.

    `seed` identifies each request; `max_new_tokens` may differ by row. Raises BadInput for an empty
    prompt and for a buffer without room.
    """
    if len(tokens) == 0 or int(np.min(length)) < 1:
        raise BadInput("an empty prompt cannot be decoded; give at least one token")
    new = np.broadcast_to(max_new_tokens, len(tokens))
    for prompt, answer in zip(length, new):
        check_room(system, int(prompt), int(answer), capacity)
    largest = max(int(row[:n].max()) for row, n in zip(np.asarray(tokens), length))
    if largest >= system.model.vocab_size:
        raise BadInput(f"token id {largest} is outside the model's vocabulary of {system.model.vocab_size}")
    padded = np.zeros((len(tokens), capacity), np.int32)
    width = min(tokens.shape[1], capacity)
    real = np.arange(width) < np.asarray(length)[:, None]
    padded[:, :width] = np.where(real, tokens[:, :width], 0)
    return DecodeState(
        tokens=jnp.array(padded),
        length=jnp.array(length, jnp.int32),
        prompt_length=jnp.array(length, jnp.int32),
        limit=jnp.array(np.asarray(length) + new, jnp.int32),
        stop_ids=jnp.array(stop_ids, jnp.int32),
        done=jnp.zeros(len(tokens), bool),
        seed=jnp.array(seed, jnp.int32),
        cache=kv.allocate(system.model, len(tokens), capacity, dtype),
        drafter=(),
        policy=(),
    )


def append(
    state: DecodeState, tokens: Int32[Array, "B P1"], count: Int32[Array, " B"]
) -> tuple[Int32[Array, "B S"], Int32[Array, " B"], Bool[Array, " B"]]:
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
