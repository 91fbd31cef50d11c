"""Ways to verify a draft tree without changing the target's distribution.

All verifiers have the signature `verify(p, draft, uniforms, max_depth, max_children) -> Verdict`:

    p             [B, N, V] float32: the target's processed distribution after each node
    uniforms      [B, P + 1, 2] in [0, 1): per level one for acceptance, one for the target's own token
    max_depth     P, the longest path that may be accepted (static)
    max_children  K, the most children a node may have (static); later ones are ignored

`greedy` compares only: its p may be any scores, such as logits, and its uniforms None.

Rows of unused nodes may hold anything, NaN included.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from eagle4.types import Verdict
from eagle4.verify import block, greedy, point_mass, rejection, with_replacement
from eagle4.verify.block import ChainLaw
from eagle4.verify.support import check_proposal
from eagle4.verify.walk import NodeLaw

__all__ = ["VERIFIERS", "ChainLaw", "NodeLaw", "Verifier", "check_proposal"]


class Verifier(NamedTuple):
    """A way to verify and the law it applies: `NodeLaw` of one node, or for `block` `ChainLaw` of a whole chain.

    `drafting` is how children must have been made for the law to be exact: `any` way; `drawn` from Draft.q, with
    or without replacement; `independent` draws from it (with replacement); `chain`, one draw per node.
    """

    verify: Callable[..., Verdict]
    law: Callable[..., Any]
    drafting: str


VERIFIERS: dict[str, Verifier] = {
    "greedy": Verifier(greedy.verify, greedy.law, "any"),
    "point_mass": Verifier(point_mass.verify, point_mass.law, "any"),
    "rejection": Verifier(rejection.verify, rejection.law, "drawn"),
    "multi_round": Verifier(with_replacement.verify_multi_round, with_replacement.multi_round, "independent"),
    "k_sequential": Verifier(
        with_replacement.verify_k_sequential, with_replacement.k_sequential, "independent"
    ),
    "block": Verifier(block.verify, block.chain_law, "chain"),
}
