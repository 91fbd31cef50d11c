"""What recorded rounds taught about a drafter's probabilities: counted, kept as JSON, and judged on other rounds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.harness import reliability as trust
from eagle4.harness.reliability import BINS, Reliability
from eagle4.policy_spec import ReliabilitySpec
from eagle4.types import RoundInfo

FORMAT = "eagle4 calibration 1"
REMEDY = "make it with experiments.reliability"


def counted(rounds: Sequence[RoundInfo], depth: int) -> Reliability:
    """Every verified node of recorded rounds (RoundInfo with a leading axis of rounds), nothing forgotten."""
    total = Reliability(*(jnp.zeros_like(x) for x in trust.nothing_seen(depth)))
    for info in rounds:
        score, level, taken = (
            jnp.asarray(x).reshape(-1, np.shape(x)[-1]) for x in (info.score, info.depth, info.taken)
        )
        accepted, active = (jnp.asarray(x).reshape(-1) for x in (info.num_accepted, info.active))
        if len(accepted):
            total = trust.count(total, score, level, taken, accepted, active, jnp.float32(1.0))
    return total


def judged(taught: Reliability, rounds: Sequence[RoundInfo]) -> dict[str, list[float]]:
    """Expected calibration error by depth of rounds that were not used for `taught`, before and after correction."""
    both = {"before": rounds, "after": [believing(taught, info) for info in rounds]}
    return {
        name: np.asarray(trust.expected_calibration_error(counted(seen, len(taught.tried)))).tolist()
        for name, seen in both.items()
    }


def believing(taught: Reliability, info: RoundInfo) -> RoundInfo:
    """The rounds with corrected probabilities as scores."""
    rates = trust.corrected(trust.bias(taught), jnp.asarray(info.score), jnp.asarray(info.depth))
    return replace(
        info, score=jnp.where(jnp.isfinite(info.score), jnp.log(jnp.maximum(rates, 1e-9)), -jnp.inf)
    )


def save_reliability(path: Path | str, counts: Reliability, about: dict[str, Any]) -> None:
    """Write the counts with what they were made on."""
    sums = {name: np.asarray(value).round(4).tolist() for name, value in counts._asdict().items()}
    write_atomic(path, json.dumps({"format": FORMAT, "about": about, **sums}, indent=1) + "\n")


def load_reliability(path: Path | str) -> ReliabilitySpec:
    """Read the counts. Raises BadInput for a file that isn't one, or whose numbers can't be counts."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"no calibration at {path} ({error.strerror}); {REMEDY}") from error
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON: {error}; {REMEDY}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadInput(f"{path} is not of format {FORMAT!r}; {REMEDY}")
    try:
        arrays = {name: np.array(content[name], np.float64) for name in Reliability._fields}
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: counts are missing or are not numbers ({error}); {REMEDY}") from error
    depth = len(arrays["tried"])
    shapes = {name: (depth,) if name in ("tried", "won") else (depth, BINS) for name in Reliability._fields}
    for name, array in arrays.items():
        if array.shape != shapes[name] or not np.isfinite(array).all() or (array < 0).any():
            raise BadInput(f"{path}: {name} must hold {shapes[name]} counts of at least 0; {REMEDY}")
    if (arrays["accepted"] > arrays["seen"]).any() or (arrays["won"] > arrays["tried"]).any():
        raise BadInput(f"{path}: more was accepted than seen; {REMEDY}")
    return ReliabilitySpec(**{name: _tuples(array.tolist()) for name, array in arrays.items()})


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values
