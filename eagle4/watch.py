"""Looking at single rounds: the phased form, one round at a time, with its draft and verdict."""

from collections.abc import Iterator, Sequence

import jax

from eagle4 import answer, decode
from eagle4.methods import Method
from eagle4.text import Text
from eagle4.types import Draft, Verdict


def watch(
    method: Method, words: Text, ids: Sequence[int], seed: int, new: int
) -> Iterator[tuple[Draft, Verdict]]:
    """Draft and verdict of every round of one request, as `decode.generate` would have them."""
    system, params = method.system, method.params
    capacity = answer.capacity_for([system], len(ids), new)
    state = answer.start(system, params, method.policy, words, ids, seed, new, capacity)
    while not bool(state.done.all()):
        planned = decode.jit_plan(system, params, state)
        guesses, dstate = decode.jit_draft(system, params, state, planned)
        checked = decode.jit_verify(system, params, state, guesses)
        yield jax.device_get((guesses, checked.verdict))
        state, _ = decode.jit_commit(system, params, state, planned, guesses, dstate, checked)
