"""One request from text to answer, on the host: prompt ids in, answer, times and rounds out.

Time to first token is the prefill; decode time is all rounds after it. `warm` compiles beforehand, so that compile
time is in neither.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle4 import decode, text
from eagle4.decode import Params
from eagle4.errors import BadInput
from eagle4.policy_spec import PolicySpec
from eagle4.specs import System
from eagle4.state import CHUNK, room
from eagle4.text import Text
from eagle4.types import DecodeState, RoundInfo

STRETCH = 16  # rounds between two looks for a stop string
CAPACITY_STEP = 512  # few buffer sizes, few compiled programs


class Limits(NamedTuple):
    """Where an answer ends, besides the model's own stop ids."""

    max_new_tokens: int
    stops: tuple[str, ...] = ()


class Answer(NamedTuple):
    """An answer's ids and text, its seconds, and RoundInfo with a leading axis of rounds ([R, 1])."""

    ids: list[int]
    text: str
    prefill_s: float
    decode_s: float
    rounds: RoundInfo


def seed_of(name: str) -> int:
    """A request's own seed, from its name: order and neighbours do not matter."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def capacity_for(systems: Sequence[System], prompt_length: int, max_new_tokens: int) -> int:
    """One buffer size for all methods, in coarse steps; raises BadInput beyond the model's context."""
    context = systems[0].model.max_position
    if prompt_length + max_new_tokens > context:
        raise BadInput(
            f"a prompt of {prompt_length} tokens + max_new_tokens={max_new_tokens} exceeds the model's context of "
            f"{context} positions; shorten the prompt or lower max_new_tokens"
        )
    need = max(room(system, prompt_length, max_new_tokens) for system in systems)
    return -(-need // CAPACITY_STEP) * CAPACITY_STEP


def start(
    system: System,
    params: Params,
    policy: PolicySpec,
    words: Text,
    ids: Sequence[int],
    seed: int,
    new: int,
    capacity: int,
) -> DecodeState:
    """Prefill one request, blocked until done."""
    tokens, length = text.pad([ids], CHUNK)
    seeds = np.array([seed], np.int32)
    state = decode.begin(system, params, policy, tokens, length, seeds, new, capacity, words.stop_ids)
    return jax.block_until_ready(state)


def answer(
    system: System,
    params: Params,
    policy: PolicySpec,
    words: Text,
    ids: Sequence[int],
    seed: int,
    limits: Limits,
    capacity: int,
) -> Answer:
    """Decode one request in the jitted loop.

    With stop strings the loop is left every few rounds to look for them on the host; ids, text and rounds all end at
    the token that completes the first one.
    """
    begun = time.perf_counter()
    state = start(system, params, policy, words, ids, seed, limits.max_new_tokens, capacity)
    first = time.perf_counter()
    most = stretch(limits)
    parts: list[RoundInfo] = []
    while not over(state, words, limits):
        state, info, count = jax.block_until_ready(decode.generate(system, params, state, most))
        parts.append(jax.tree.map(lambda a, n=int(count): np.asarray(a)[:n], info))
    ended = time.perf_counter()
    rounds = jax.tree.map(lambda *a: np.concatenate(a), *parts) if parts else no_rounds()
    kept, string, _ = text.find_stop(words, answer_ids(state), limits.stops)
    return Answer(answer_ids(state)[:kept], string, first - begun, ended - first, crop(rounds, kept))


def over(state: DecodeState, words: Text, limits: Limits) -> bool:
    """Whether the request has ended, or a stop string is complete."""
    if bool(state.done.all()):
        return True
    return bool(limits.stops) and text.find_stop(words, answer_ids(state), limits.stops)[2] is not None


def stretch(limits: Limits) -> int:
    """Rounds between two returns to the host: all of them, unless stop strings must be looked for."""
    return STRETCH if limits.stops else limits.max_new_tokens


def warm(
    system: System, params: Params, policy: PolicySpec, words: Text, limits: Limits, capacity: int
) -> None:
    """Compile everything `answer` will run with this buffer size, and run it for a few rounds."""
    new = min(8, limits.max_new_tokens)
    state = start(system, params, policy, words, [0] * (CHUNK // 2), 0, new, capacity)
    jax.block_until_ready(decode.generate(system, params, state, stretch(limits)))


def answer_ids(state: DecodeState) -> list[int]:
    """The committed answer of a one-row state."""
    return np.asarray(state.tokens)[0, int(state.prompt_length[0]) : int(state.length[0])].tolist()


def no_rounds() -> RoundInfo:
    """The history of an answer that ended with the prefill's own token."""
    none, rows, nodes = jnp.zeros((0, 1), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros((0, 1, 1), jnp.int32)
    return RoundInfo(
        active=none.astype(bool),
        drafted_depth=none,
        drafted_nodes=none,
        verified_nodes=rows,
        num_accepted=none,
        num_committed=none,
        levels=rows,
        score=nodes.astype(jnp.float32),
        depth=nodes,
        taken=nodes.astype(bool),
        predicted_ms=rows.astype(jnp.float32),
    )


def crop(rounds: RoundInfo, kept: int) -> RoundInfo:
    """Rounds that make up the first `kept` ids: later ones are dropped, the last one commits what is left.

    The first id is the prefill's own token and belongs to no round.
    """
    count = rounds.num_committed
    before = np.cumsum(count, axis=0) - count
    left = np.clip(kept - 1 - before, 0, count)
    needed = int((left[:, 0] > 0).sum())
    return jax.tree.map(lambda a: a[:needed], replace(rounds, num_committed=left))


def phase_ms(
    system: System,
    params: Params,
    policy: PolicySpec,
    words: Text,
    ids: Sequence[int],
    seed: int,
    new: int,
    capacity: int,
) -> dict[str, float]:
    """Mean milliseconds a round spends in draft, verify and commit, from the phased form (the first round is left out:
    it compiles)."""
    state = start(system, params, policy, words, ids, seed, new, capacity)
    spent: dict[str, list[float]] = {"draft_ms": [], "verify_ms": [], "commit_ms": []}

    def timed(name: str, step: Callable):
        begun = time.perf_counter()
        result = jax.block_until_ready(step())
        spent[name].append(1e3 * (time.perf_counter() - begun))
        return result

    while not bool(state.done.all()):
        planned = decode.jit_plan(system, params, state)
        guesses, dstate = timed("draft_ms", lambda s=state, p=planned: decode.jit_draft(system, params, s, p))
        checked = timed("verify_ms", lambda s=state, g=guesses: decode.jit_verify(system, params, s, g))
        state, _ = timed(
            "commit_ms",
            lambda s=state, p=planned, g=guesses, d=dstate, c=checked: decode.jit_commit(
                system, params, s, p, g, d, c
            ),
        )
    return {name: float(np.mean(times[1:])) for name, times in spent.items() if len(times) > 1}


def compare_greedy(
    system: System,
    params: Params,
    prompt: Sequence[int],
    plain: Sequence[int],
    ids: Sequence[int],
    gap: float,
) -> tuple[bool, int]:
    """(identical up to ties, number of ties) of greedy ids against plain decoding's.

    Where the ids differ, they are teacher-forced through the target: every one must be the argmax, or within `gap` of
    it (a tie, counted). An answer of another length than its ids allow is not identical.
    """
    if list(ids) == list(plain):
        return True, 0
    whole = np.array([*prompt, *ids], np.int32)
    width = -(-len(whole) // CAPACITY_STEP) * CAPACITY_STEP
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(whole)] = whole
    lengths = np.int32(len(prompt)), np.int32(len(whole))
    short = np.asarray(decode.jit_shortfall(system, params.target, padded, *lengths))[slice(*lengths)]
    first = next((i for i, (a, b) in enumerate(zip(ids, plain)) if a != b), None)
    ties = int(((short > 0) & (short < gap)).sum())
    if first is None or short.max(initial=0.0) >= gap:
        return False, ties
    # The two argmaxes of a tie differ by rounding, so one of them may be the argmax of this third computation.
    return True, max(1, ties)
