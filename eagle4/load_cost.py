"""A batch of requests decoded together: tokens per second, and how far each round speculated."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from eagle4 import decode
from eagle4.errors import BadInput
from eagle4.methods import Method
from eagle4.text import Text, pad
from eagle4.types import RoundInfo


class Batched(NamedTuple):
    """One decode of a batch: answers, wall seconds of its rounds (prefill apart), and RoundInfo [R, …]."""

    ids: list[list[int]]
    decode_s: float
    rounds: RoundInfo


def decode_batch(
    method: Method,
    words: Text,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    new: int,
    capacity: int,
) -> Batched:
    """Decode all prompts in one batch until each has `new` tokens or has ended."""
    if not prompts:
        raise BadInput("an empty batch cannot be decoded; give at least one prompt")
    tokens, length = pad(prompts, 1)
    state = decode.begin(
        method.system,
        method.params,
        method.policy,
        tokens,
        length,
        np.asarray(seeds, np.int32),
        new,
        capacity,
        words.stop_ids,
    )
    state = jax.block_until_ready(state)
    begun = time.perf_counter()
    state, rounds, count = jax.block_until_ready(decode.generate(method.system, method.params, state, new))
    spent = time.perf_counter() - begun
    text, first, last = (np.asarray(a) for a in (state.tokens, state.prompt_length, state.length))
    answers = [row[a:b].tolist() for row, a, b in zip(text, first, last)]
    return Batched(answers, spent, jax.tree.map(lambda a: np.asarray(a)[: int(count)], rounds))


def summary(runs: Sequence[Batched]) -> dict[str, float | None]:
    """Pooled over repeats: tokens per second (the prefill's own tokens apart), and means over rounds.

    levels: draft levels computed; nodes: rows of one request that were verified; tau: tokens per active row and round.
    `predicted_ms` is None without a cost table.
    """
    infos = [run.rounds for run in runs]
    tokens = sum(int(info.num_committed.sum()) for info in infos)
    active = sum(int(info.active.sum()) for info in infos)
    rounds = sum(len(info.levels) for info in infos)
    seconds = sum(run.decode_s for run in runs)
    predicted = sum(float(info.predicted_ms.sum()) for info in infos) / rounds
    return {
        "tokens_per_s": tokens / seconds,
        "tau": sum(int((info.num_accepted + 1)[info.active].sum()) for info in infos) / active,
        "levels": sum(int(info.levels.sum()) for info in infos) / rounds,
        "nodes": sum(int(info.verified_nodes.sum()) for info in infos) / rounds,
        "round_ms": 1e3 * seconds / rounds,
        "predicted_ms": predicted if np.isfinite(predicted) else None,
    }
