"""A real decode with the drafter as it stands: what training is for, measured while it goes on."""

from typing import Any

import numpy as np

from eagle4 import decode, metrics
from eagle4.decode import Params
from eagle4.drafters import eagle_net
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, System, TreeSpec
from eagle4.state import CHUNK, room
from eagle4.text import pad

TREE = TreeSpec("dynamic", depth=4, width=4, children=4, nodes=8, buckets=(8,))


def trial_tau(
    spec: EagleSpec,
    params: dict[str, Any],
    target: ModelSpec,
    target_params: dict[str, Any],
    prompts: list[list[int]],
    stop_ids: tuple[int, ...],
    new: int = 64,
    tree: TreeSpec = TREE,
) -> float:
    """Pooled acceptance length (bonus token counted, before cropping) of greedy decoding on `prompts`, as one batch.

    Params are arguments of the compiled program, so one compilation serves the whole run.
    """
    system = System(target, DrafterSpec("eagle", eagle=spec), tree, taps=spec.taps)
    weights = Params(target_params, eagle_net.borrow(params, target_params))
    tokens, length = pad(prompts, CHUNK)
    capacity = -(-room(system, int(length.max()), new) // CHUNK) * CHUNK
    seeds = np.zeros(len(prompts), np.int32)
    state = decode.begin(system, weights, PolicySpec(), tokens, length, seeds, new, capacity, stop_ids)
    _, rounds, _ = decode.generate(system, weights, state, new)
    return metrics.tau(metrics.pool([metrics.rounds_of(rounds, row) for row in range(len(prompts))]))
