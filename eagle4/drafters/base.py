"""The contract every drafter keeps.

Like an optax transformation, a drafter is a few pure functions over an explicit state. The state is any pytree whose
structure, shapes and dtypes never change. A new method is one file with a `make` (spec, tree, decide) -> Drafter, one
line in `eagle4.drafters.DRAFTERS` and one YAML in `configs/method`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int32

from eagle4.types import Commit, Draft, Plan


class Drafter(NamedTuple):
    """Pure functions of one drafting method.

    init:    (params, tokens [B, S], length [B]) -> state. The prompt, right-padded to the row's whole capacity S.
    propose: (params, state, root [B], plan, keys [B]) -> (Draft, state). `root` is the last committed token; one key
             per row, already folded from the request and its position.
    commit:  (params, state, Commit, start [B]) -> state. Called for every stretch of committed text in order: the
             prompt in chunks, then each round, also a round that drafted nothing. Row i of `features` belongs to
             position start + i, and tokens[:, i] stands at start + i + 1.
    """

    init: Callable[[Any, Int32[Array, "B S"], Int32[Array, " B"]], Any]
    propose: Callable[[Any, Any, Int32[Array, " B"], Plan, jax.Array], tuple[Draft, Any]]
    commit: Callable[[Any, Any, Commit, Int32[Array, " B"]], Any]
