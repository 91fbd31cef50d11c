"""Compiled functions of training: the only place here that calls jax.jit."""

import jax
import jax.numpy as jnp

from eagle4.retrieval.coverage import Coverage, coverage, covered
from eagle4.retrieval.factors import Factors
from eagle4.retrieval.shortlist import SELECTIONS
from eagle4.train import capture, head, optimise

capture_chunk = jax.jit(capture.chunk, static_argnames=("spec", "taps"))
jit_update = jax.jit(optimise.update, static_argnames=("spec", "train", "steps"), donate_argnames="state")
jit_evaluate = jax.jit(optimise.evaluate, static_argnames=("spec", "steps"))


def _coverage(factors: Factors, rows: jax.Array, states: jax.Array, count: int, selection: str) -> Coverage:
    return coverage(factors, rows, states, count, select=SELECTIONS[selection])


def _covered(ids: jax.Array, rows: jax.Array, states: jax.Array) -> Coverage:
    return covered(jnp.broadcast_to(ids, (len(states), len(ids))), rows, states)


jit_states = jax.jit(head.states_of, static_argnames=("spec", "steps"))
jit_head_update = jax.jit(head.update, static_argnames="spec")
jit_coverage = jax.jit(_coverage, static_argnames=("count", "selection"))
jit_covered = jax.jit(_covered)
