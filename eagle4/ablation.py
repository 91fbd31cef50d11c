"""Judging many settings on one recording: which are inside it, what each would have cost, and how far from perfect."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from eagle4.errors import BadInput
from eagle4.harness import costs as cost
from eagle4.harness.costs import CostTable
from eagle4.methods import check_envelope
from eagle4.oracle import best_walk
from eagle4.policy_spec import PolicySpec
from eagle4.recording import About, Recorded, Variant
from eagle4.replay import History, Tape, at_batch, tape, walk
from eagle4.specs import TreeSpec

TOGETHER = 32  # settings that are walked side by side in one call


class Setting(NamedTuple):
    """What may differ between two replays of one recording; `overrides` are the words for it."""

    head: str
    tree: TreeSpec
    policy: PolicySpec
    overrides: tuple[tuple[str, Any], ...] = ()


class Outcome(NamedTuple):
    """A setting's figures over all answers. Costs are the table's; `tau` counts the own token, before cropping.

    `expected_tau` is what draws of the target would give on average, None without recorded probabilities.
    `levels` and `rows` are means a round, `*_ms` means a round, `ms_per_token` and `speedup` pooled over answers
    (plain decoding is one verification of one row a token). `by_answer`: speed-up of each answer.
    """

    kind: str
    name: str
    settings: dict[str, Any]
    batch: int
    tau: float
    expected_tau: float | None
    speedup: float
    ms_per_token: float
    rounds: int
    tokens: int
    levels: float
    rows: float
    first_ms: float
    steps_ms: float
    verify_ms: float
    by_answer: tuple[float, ...] = ()


def expand(base: Setting, grids: Sequence[Mapping[str, Sequence[Any]]]) -> list[Setting]:
    """The combinations of every grid such as {"policy.tau": [0, 1], "tree.nodes": [4, 8]} over `base`; `base` alone if
    there is no grid.

    Raises BadInput for an unknown key and for an empty list.
    """
    return [setting for grid in grids or [{}] for setting in combinations(base, grid)]


def combinations(base: Setting, grid: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every combination of one grid's values."""
    known = {
        *(f"tree.{f.name}" for f in fields(TreeSpec)),
        *(f"policy.{f.name}" for f in fields(PolicySpec)),
    }
    for key, values in grid.items():
        if key not in known:
            raise BadInput(f"grid key {key!r} is not known; use a field of tree or policy, like policy.tau")
        if not isinstance(values, (list, tuple)) or not values:
            raise BadInput(f"grid.{key} must list at least one value, got {values!r}")
    settings = []
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values))
        tree = replace(base.tree, **part_of(chosen, "tree."))
        policy = replace(base.policy, **part_of(chosen, "policy."))
        settings.append(Setting(base.head, tree, policy, (*base.overrides, *chosen.items())))
    return settings


def part_of(chosen: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Fields of one spec, lists as tuples."""
    return {
        key.removeprefix(prefix): tuple(value) if isinstance(value, list) else value
        for key, value in chosen.items()
        if key.startswith(prefix)
    }


def variant_of(setting: Setting, about: About) -> Variant:
    """The recorded trees that a setting's are a part of. Raises BadInput for what was not recorded."""
    tree, policy = setting.tree, setting.policy
    check_envelope(tree, policy)
    if tree.kind not in ("chain", "dynamic"):
        raise BadInput(f"tree.kind={tree.kind} is not recorded; a recording judges chain and dynamic trees")
    chain = tree.kind == "chain"
    width, children = (1, 1) if chain else (policy.width or tree.width, policy.children or tree.children)
    wanted = Variant(setting.head, width, children)
    if wanted not in about.variants:
        there = ", ".join(v.name for v in about.variants)
        raise BadInput(
            f"{wanted.name} is outside the recording, which has {there}; record it, or choose one of these"
        )
    if tree.depth > about.depth:
        raise BadInput(
            f"tree.depth={tree.depth} is outside the recording, which is {about.depth} deep; record deeper"
        )
    return wanted


def contexts(answers: Sequence[Recorded], new: int, tree: TreeSpec, step: int) -> list[int]:
    """Cache slots of each answer's rounds: prompt, answer and one path, in steps of `step`, as decoding allocates."""
    need = [a.prompt_length + new + tree.depth + 1 for a in answers]
    return [-(-n // step) * step for n in need]


def judge(
    answers: Sequence[Recorded],
    about: About,
    settings: Sequence[Setting],
    costs: CostTable,
    context: Sequence[int],
    batch: int = 1,
    told: Any = lambda n: None,
) -> list[Outcome]:
    """The outcome of every setting, in order. `told` hears how many more are done."""
    groups: dict[tuple, list[int]] = {}
    for i, setting in enumerate(settings):
        groups.setdefault((variant_of(setting, about), setting.tree, setting.policy.name), []).append(i)
    tapes: dict[tuple, Tape] = {}
    found: dict[int, Outcome] = {}
    for (variant, tree, _), places in groups.items():
        key = variant, tree.depth, tree.width
        if key not in tapes:
            tapes[key] = tape(answers, variant.name, tree.depth, tree.width, context)
        size = min(TOGETHER, 1 << (len(places) - 1).bit_length())
        for begin in range(0, len(places), size):
            part = places[begin : begin + size]
            # Filled up to one size, so that the last ones need no program of their own.
            chosen = [settings[part[min(j, len(part) - 1)]].policy for j in range(size)]
            history = walk(tapes[key], tree, chosen, costs, batch)
            plain = plain_ms(costs, context, batch)
            for s, i in enumerate(part):
                found[i] = outcome(settings[i], history, s, plain, answers, batch)
            told(len(part))
    return [found[i] for i in range(len(settings))]


def plain_ms(costs: CostTable, context: Sequence[int], batch: int) -> np.ndarray:
    """What a token takes without drafting, by answer."""
    table = at_batch(costs, batch)
    price = {c: float(cost.at(table.verify, 1, c, 1)) for c in set(context)}
    return np.array([price[c] for c in context])


def outcome(
    setting: Setting, history: History, s: int, plain: np.ndarray, answers: Sequence[Recorded], batch: int
) -> Outcome:
    """Sums over one setting's rounds."""
    cut = History(*(values[:, s] for values in history))
    active, rounds = cut.active, max(int(cut.active.sum()), 1)
    by_answer = (cut.first_ms + cut.steps_ms + cut.verify_ms).sum(0, dtype=np.float64)
    tokens = np.array([a.length - 1 for a in answers])
    expected = float(cut.expected[active].sum()) / rounds
    speed = plain * tokens / np.where(by_answer > 0, by_answer, np.nan)
    return Outcome(
        kind="fixed" if setting.policy.name == "fixed" else "policy",
        name=" ".join(f"{k}={v}" for k, v in setting.overrides) or setting.policy.name,
        settings=dict(setting.overrides),
        batch=batch,
        tau=float((cut.accepted + 1)[active].sum()) / rounds,
        expected_tau=expected if np.isfinite(expected) else None,
        speedup=float((plain * tokens).sum() / by_answer.sum()),
        ms_per_token=float(by_answer.sum() / tokens.sum()),
        rounds=rounds,
        tokens=int(tokens.sum()),
        levels=float(cut.levels.sum() / rounds),
        rows=float(cut.rows.sum() / rounds),
        first_ms=float(cut.first_ms.sum() / rounds),
        steps_ms=float(cut.steps_ms.sum() / rounds),
        verify_ms=float(cut.verify_ms.sum() / rounds),
        by_answer=tuple(np.round(speed, 4).tolist()),
    )


def fixed_settings(about: About, head: str, counts: Sequence[int]) -> list[Setting]:
    """Every fixed depth and node count of the recorded shapes of a head; a pass is compiled for each of `counts`."""
    found, counts = [], sorted(set(counts))
    for variant in about.variants:
        most = 1 + variant.pool(about.depth)
        if variant.head != head or counts[0] > most:
            continue
        kind = "chain" if variant.width == variant.children == 1 else "dynamic"
        nodes = max(n for n in counts if n <= most)
        tree = TreeSpec(kind, about.depth, variant.width, variant.children, nodes, buckets=tuple(counts))
        for depth, count in product(range(1, about.depth + 1), counts):
            if depth < count <= min(nodes, 1 + variant.pool(depth)):
                words = (("shape", f"{variant.width}x{variant.children}"), ("depth", depth), ("nodes", count))
                found.append(Setting(head, tree, PolicySpec(depth=depth, nodes=count), words))
    return found


def perfect(
    answers: Sequence[Recorded],
    about: About,
    setting: Setting,
    costs: CostTable,
    context: Sequence[int],
    batch: int = 1,
) -> Outcome:
    """The oracle of a setting's envelope: what the best choice in every round, with hindsight, would have given."""
    tree = setting.tree
    best = best_walk(
        tape(answers, variant_of(setting, about).name, tree.depth, tree.width, context), tree, costs, batch
    )
    tokens, plain = np.array([a.length - 1 for a in answers]), plain_ms(costs, context, batch)
    rounds = max(int(best.rounds.sum()), 1)
    return Outcome(
        kind="oracle",
        name="oracle",
        settings=dict(setting.overrides),
        batch=batch,
        tau=float(tokens.sum() / rounds),
        expected_tau=None,
        speedup=float((plain * tokens).sum() / best.ms.sum()),
        ms_per_token=float(best.ms.sum() / tokens.sum()),
        rounds=rounds,
        tokens=int(tokens.sum()),
        levels=float(best.levels.sum() / rounds),
        rows=float(best.rows.sum() / rounds),
        first_ms=float("nan"),
        steps_ms=float("nan"),
        verify_ms=float("nan"),
        by_answer=tuple(np.round(plain * tokens / np.maximum(best.ms, 1e-9), 4).tolist()),
    )


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Plain dicts, for replay.json."""
    return [o._asdict() | {"settings": {k: plain_value(v) for k, v in o.settings.items()}} for o in outcomes]


def plain_value(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
