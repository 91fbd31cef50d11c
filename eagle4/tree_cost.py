"""What growing and verifying a tree cost apart from any network, as shares of a plain decode step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle4 import decode
from eagle4.decode import Params
from eagle4.forward_cost import WARMUP, Tell, forward_calls
from eagle4.harness.clock import interleaved, median, spread
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, SamplingSpec, System, TreeSpec
from eagle4.target.load import Checkpoint

GROWN = ("chain", "dynamic", "sampled")
CANDIDATES = 64


def random_table(vocab_size: int, seed: int = 0) -> dict[str, Any]:
    """A bigram drafter's table of distinct random candidates with falling probabilities."""
    rng = np.random.default_rng(seed)
    ids = (rng.integers(0, vocab_size, (vocab_size, 1)) + np.arange(CANDIDATES) * 7) % vocab_size
    probs = np.sort(rng.dirichlet(np.full(CANDIDATES, 0.2), 4096), axis=1)[:, ::-1]
    return {"ids": jnp.array(ids, jnp.int32), "probs": jnp.array(np.resize(probs, ids.shape), jnp.float32)}


def tree_times(
    model: Checkpoint, tree: TreeSpec, verifiers: list[str], repeats: int, tell: Tell
) -> list[dict[str, Any]]:
    """Median ms of a plain decode step, of growing each kind of tree, and of each verifier on a tree of that size.

    The drafter is a table, so growing is candidates, scores, frontier, rerank and masks. Verifying starts from p
    [1, N, V] and is the walk and the final draw. All are timed in turn.
    """
    params = Params(model.params, random_table(model.spec.vocab_size))
    calls: dict[str, Callable[[], Any]] = {"plain decode step": forward_calls(model, 1, 256, [1])[1]}
    for kind in GROWN:
        calls[f"grow {kind}"] = growing(model, params, replace(tree, kind=kind))
    for name in verifiers:
        calls[f"verify {name}"] = verifying(model, params, tree, name)
    seconds = interleaved(calls, repeats, WARMUP, progress=tell)
    step = median(seconds["plain decode step"])
    return [
        {"what": what, "ms": 1e3 * median(s), "spread": spread(s), "share": median(s) / step}
        for what, s in seconds.items()
    ]


def begin(model: Checkpoint, params: Params, tree: TreeSpec, verifier: str) -> tuple[System, Any]:
    sampling = SamplingSpec(temperature=0.0 if verifier == "greedy" else 1.0)
    system = System(model.spec, DrafterSpec("bigram"), tree, verifier=verifier, sampling=sampling)
    one = np.ones((1, 1), np.int32)
    return system, decode.begin(system, params, PolicySpec(), one, np.ones(1, np.int32), np.zeros(1), 64, 128)


def growing(model: Checkpoint, params: Params, tree: TreeSpec) -> Callable[[], Any]:
    system, state = begin(model, params, tree, "rejection" if tree.kind == "sampled" else "greedy")
    plan = decode.plan(system, params, state)
    return lambda: decode.jit_draft(system, params, state, plan)


def verifying(model: Checkpoint, params: Params, tree: TreeSpec, verifier: str) -> Callable[[], Any]:
    """Drawn children for the verifiers that need q, a drawn chain for block verification, else the likeliest."""
    if verifier == "block":
        tree = TreeSpec("sampled", tree.depth, 1, 1, tree.depth + 1)
    elif verifier not in ("greedy", "point_mass"):
        tree = replace(tree, kind="sampled")
    system, state = begin(model, params, tree, verifier)
    guesses, _ = decode.jit_draft(system, params, state, decode.plan(system, params, state))
    p = jax.nn.softmax(jax.random.normal(jax.random.key(0), (*guesses.tokens.shape, model.spec.vocab_size)))
    uniforms = jax.random.uniform(jax.random.key(1), (1, tree.depth + 1, 2))
    return lambda: decode.jit_accept(system, p, guesses, uniforms)
