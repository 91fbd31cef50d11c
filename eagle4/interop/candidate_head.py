"""EAGLE-4's candidate head in published checkpoints: low-rank factors beside a head of the whole vocabulary.

Coarse scores of a state h are `efficient_lm_head` · (`efficient_lm_head_down_proj` · h), our up · (down · h). The best
of them are scored again by the rows of `lm_head`, and q is a softmax over those alone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle4.errors import BadInput
from eagle4.nn.abstract import Leaf
from eagle4.target.config import integer

ARCHITECTURE, KEY, PREFIX = "LlamaForCausalLMEagle4", "efficient_lm_head_config", "efficient_lm_head"
# Our factors' fields under their published names.
NAMES = {"down": "efficient_lm_head_down_proj.weight", "up": "efficient_lm_head.weight"}
# Plain, or weighted by token frequency: how a loader makes factors where there are none. Stored ones are used alike.
KINDS = ("low_rank", "weighted_low_rank")
FIELDS = {"type", "rank", "num_candidates", "smooth_factor"}


class CandidateHead(NamedTuple):
    """What a config says of the factors: their rank, and how many candidates they are to find."""

    rank: int
    candidates: int


def is_eagle4(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether these tensors or this config are of the layout; the factors may be missing."""
    architectures = config.get("architectures") or ()
    return KEY in config or ARCHITECTURE in architectures or any(n.startswith(PREFIX) for n in names)


def candidate_head(config: Mapping[str, Any], width: int, vocab_size: int) -> CandidateHead | None:
    """The candidate head of a config; None if it names none. Raises BadInput for one that can't be meant."""
    inner = config.get(KEY)
    if inner is None:
        return None
    if not isinstance(inner, Mapping):
        raise BadInput(f"config.json: {KEY} must be an object, got {inner!r}")
    for key in inner:
        if key not in FIELDS:
            raise BadInput(f"config.json: {KEY} has the unknown key {key!r}")
    if inner.get("type") not in KINDS:
        raise BadInput(
            f"config.json: {KEY}.type = {inner.get('type')!r} is not supported; use one of {', '.join(KINDS)}"
        )
    said = CandidateHead(integer(inner, "rank"), integer(inner, "num_candidates"))
    for name, value, most in (("rank", said.rank, width), ("num_candidates", said.candidates, vocab_size)):
        if not 1 <= value <= most:
            raise BadInput(f"config.json: {KEY}.{name} must lie in 1..{most}, got {value}")
    return said


def factor_leaves(
    said: CandidateHead | None, names: set[str], width: int, vocab_size: int
) -> dict[str, Leaf]:
    """The factors' tensors that a checkpoint with these names must hold: both of them, or none."""
    found = sorted(names & set(NAMES.values()))
    if not found:
        return {}
    if said is None:
        raise BadInput(
            f"config.json: {KEY} is missing, but there is {found[0]}; give its type, rank and num_candidates"
        )
    return {
        NAMES["up"]: Leaf((vocab_size, said.rank), ("vocab", None)),
        NAMES["down"]: Leaf((said.rank, width), (None, "embed")),
    }
