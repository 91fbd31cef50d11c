"""Cost tables of this machine: measured, kept as JSON, and read back only for what they were measured for.

A file holds the three parts of a `CostTable` with the spread of every point, and a fingerprint of device, target and
drafter. A table of another machine, model or version is refused unless that is asked for, and then says so.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import platformdirs
from rich.console import Console

from eagle4.errors import BadInput
from eagle4.files import write_atomic
from eagle4.fingerprint import device_fingerprint
from eagle4.forward_cost import WARMUP, bar
from eagle4.harness import costs
from eagle4.harness.costs import AXES, CostTable, Grid
from eagle4.harness.roofline import HardwareSpec
from eagle4.methods import Method
from eagle4.round_cost import Measured, count, has_network, measure
from eagle4.specs import DrafterSpec, ModelSpec
from eagle4.target.load import Checkpoint

FORMAT = "eagle4 costs 1"
# What has to agree before a table is used: of a modelled one everything but the machine.
SAME = {"measured": ("device", "target", "drafter"), "modelled": ("target", "drafter")}
REMEDY = "measure one with experiments.calibrate"


class Source(NamedTuple):
    """Where a table is from. kind: measured or modelled. `differences`: keys that a forced one disagrees in."""

    kind: str
    path: str
    forced: bool = False
    differences: tuple[str, ...] = ()


def describe(source: Source) -> str:
    """One line for every output that rests on the table."""
    line = f"costs: {source.kind} ({source.path})"
    return f"{line}, forced although {', '.join(source.differences)} differ" if source.forced else line


# --- what a table belongs to ---


def fingerprint(model: Checkpoint, method: Method | None) -> dict[str, Any]:
    """Device, target and drafter as plain JSON: two equal ones may share a table."""
    device = device_fingerprint(str(model.params["embed"].dtype))
    drafter = DrafterSpec() if method is None else method.system.drafter
    return _plain({"device": device, **_specs(model.spec, drafter)})


def modelled_fingerprint(hardware: HardwareSpec, target: ModelSpec, drafter: DrafterSpec) -> dict[str, Any]:
    return _plain({"hardware": asdict(hardware), **_specs(target, drafter)})


def _specs(target: ModelSpec, drafter: DrafterSpec) -> dict[str, Any]:
    """Drafters without a network are told apart by name alone."""
    network = (drafter.eagle, drafter.retrieval) if drafter.name == "eagle" else (None, None)
    eagle, retrieval = (spec and asdict(spec) for spec in network)
    return {
        "target": asdict(target),
        "drafter": {"name": drafter.name, "eagle": eagle, "retrieval": retrieval},
    }


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def differences(there: dict[str, Any], here: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two fingerprints differ, and both values; 'missing' where one has none."""
    stored, wanted = _flat(there), _flat(here)
    pairs = {
        key: (stored.get(key, "missing"), wanted.get(key, "missing"))
        for key in dict.fromkeys([*wanted, *stored])
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return found


# --- files ---


def save(path: Path | str, made: Measured, key: dict[str, Any], kind: str = "measured") -> None:
    """Write a table with the fingerprint it holds for."""
    parts = {
        part: {name: np.asarray(value).tolist() for name, value in grid._asdict().items()}
        | {"spread": made.spread[part].tolist()}
        for part, grid in made.table._asdict().items()
    }
    content = {"format": FORMAT, "kind": kind, "fingerprint": key, "parts": parts}
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read(path: Path | str, expected: dict[str, Any] | None, force: bool = False) -> tuple[CostTable, Source]:
    """The table of a file, if it is whole and made for `expected` (None: for anything).

    Raises BadInput for a file that is damaged or holds costs that can't be, and for another fingerprint, naming the
    first key that differs; `force` takes the table all the same. Nothing is repaired.
    """
    content = _content(Path(path))
    there, kind = content["fingerprint"], content["kind"]
    odd = {}
    if expected is not None:
        odd = differences(*({name: side.get(name) for name in SAME[kind]} for side in (there, expected)))
    if odd and not force:
        key, (stored, wanted) = next(iter(odd.items()))
        raise BadInput(
            f"{path} was made for another {key} ({stored} there, {wanted} here); {REMEDY} on this machine for this "
            "method, or take it all the same with costs.force=true"
        )
    table = CostTable(
        **{part: _grid(f"{path}: {part}", content["parts"][part]) for part in CostTable._fields}
    )
    if table.verify.size[0] != 1 or table.first.size.tolist() != [1]:
        raise BadInput(f"{path}: sizes of verify must begin with 1, and first has size 1 alone; {REMEDY}")
    return table, Source(kind, str(path), bool(odd), tuple(odd))


def _content(path: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a cost")

    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    except OSError as error:
        raise BadInput(f"no cost table at {path} ({error.strerror}); {REMEDY}") from error
    except ValueError as error:
        raise BadInput(f"{path} is not valid JSON: {error}; {REMEDY}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadInput(f"{path} is not of format {FORMAT!r}; {REMEDY}")
    _keys(content, ("format", "kind", "fingerprint", "parts"), str(path))
    if content["kind"] not in SAME:
        raise BadInput(f"{path}: kind must be one of {', '.join(SAME)}, got {content['kind']!r}; {REMEDY}")
    made = "device" if content["kind"] == "measured" else "hardware"
    _keys(content["fingerprint"], (made, "target", "drafter"), f"{path}: fingerprint")
    _keys(content["parts"], CostTable._fields, f"{path}: parts")
    return content


def _keys(value: Any, wanted: Sequence[str], where: str) -> None:
    if not isinstance(value, dict) or set(value) != set(wanted):
        odd = ", ".join(sorted(set(value) ^ set(wanted))) if isinstance(value, dict) else repr(value)
        raise BadInput(f"{where} has unknown or missing keys: {odd}; {REMEDY}")


def _grid(where: str, part: Any) -> Grid:
    """A part as it was written: what `costs.grid` would have to raise is refused."""
    _keys(part, (*Grid._fields, "spread"), where)
    arrays = {name: _numbers(f"{where}: {name}", part[name], 1 if name in AXES else 3) for name in part}
    spreads, ms = arrays.pop("spread"), arrays["ms"]
    try:
        grid = costs.grid(**arrays)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    if any((np.diff(ms, axis=axis) < 0).any() for axis in range(3)):
        raise BadInput(f"{where}: ms falls where batch, context or size grows; {REMEDY}")
    if spreads.shape != ms.shape or not np.isfinite(spreads).all() or (spreads < 0).any():
        raise BadInput(f"{where}: spread must be at least 0, one number for each of ms; {REMEDY}")
    return grid


def _numbers(where: str, values: Any, dims: int) -> np.ndarray:
    try:
        array = np.array(values)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "if" or array.ndim != dims:
        raise BadInput(f"{where} must be a list of numbers, {dims} deep; {REMEDY}")
    return array.astype(np.float64)


# --- the user's own tables ---


def folder() -> Path:
    """Where this user's tables are kept."""
    return platformdirs.user_cache_path("eagle4") / "costs"


def cached_path(key: dict[str, Any]) -> Path:
    return folder() / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def covers(table: CostTable, method: Method | None, lists: Mapping[str, Sequence[int]]) -> bool:
    """Whether no wanted point lies outside the table; between its points it is interpolated."""
    return all(
        axis[0] <= min(lists[name]) and max(lists[name]) <= axis[-1]
        for name, axis in _axes(table, method).items()
    )


def _axes(table: CostTable, method: Method | None) -> dict[str, list[int]]:
    axes = {"batch": table.verify.batch, "context": table.verify.context, "nodes": table.verify.size}
    axes |= {"width": table.step.size} if has_network(method) else {}
    return {name: [int(value) for value in axis] for name, axis in axes.items()}


def cached(
    model: Checkpoint,
    method: Method | None,
    lists: Mapping[str, Sequence[int]],
    repeats: int,
    console: Console,
    make: Callable[..., Measured] = measure,
) -> tuple[CostTable, Source]:
    """This machine's table for target and drafter: the kept one if it covers `lists`, else measured now and kept.

    A table that is too small is measured anew over its own points and the wanted ones; a damaged one too, which is
    said. `make` is what measures.
    """
    key = fingerprint(model, method)
    path, wanted = cached_path(key), {name: sorted(set(values)) for name, values in lists.items()}
    if path.exists():
        try:
            table, source = read(path, key)
        except BadInput as error:
            console.print(f"{error} (measuring it now)", style="yellow", soft_wrap=True)
        else:
            if covers(table, method, wanted):
                return table, source
            wanted |= {name: sorted({*wanted[name], *axis}) for name, axis in _axes(table, method).items()}
    with bar(console) as progress:
        task = progress.add_task("measuring costs", total=(WARMUP + repeats) * count(method, wanted))
        made = make(model, method, wanted, repeats, lambda _: progress.advance(task))
    save(path, made, key)
    return made.table, Source("measured", str(path))
