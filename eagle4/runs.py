"""What experiments left in their run folders, read back: the truth that pages and comparisons start from.

A run folder holds config.yaml, environment.json and status.json (`eagle4.tracking`) and what its experiment wrote: a
benchmark summary.json, rounds.jsonl and metrics.jsonl; a load run load.json; a replay replay.json; a drawing
rounds.html. Any of them may be missing, as they are after a failure. What is there has to be whole.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from eagle4.errors import BadInput
from eagle4.summary import Row

PLAIN = "ar"  # plain decoding, under the name that every benchmark gives it
SHOWN = ("benchmark", "load", "replay", "draw")
FILES = ("summary.json", "rounds.jsonl", "load.json", "replay.json", "rounds.html")
METHOD_GROUPS = ("drafter", "tree", "policy", "verifier")

# What every record has to say, and as what; the rest may be missing.
_NUMBER, _MAYBE = (int, float), (int, float, type(None))
_LISTS = ("histogram", "joint", "conditional")
_ROW = {"method": str, "category": str, "prompts": int}
_COUNTS = ("round", "drafted_depth", "verified_nodes", "num_accepted")
_ROUND = {"method": str, "prompt_id": str, **dict.fromkeys(_COUNTS, int)}
_REQUEST = {"method": str, "prompt_id": str, "decode/time_s": _NUMBER, "decode/rounds": int}
_MEANS = ("tokens_per_s", "speedup_vs_ar", "tau", "levels", "nodes", "round_ms", "predicted_ms")
_LOAD = {"batch": int, "method": str, **dict.fromkeys(_MEANS, _MAYBE)}
_REPLAYED = ("tau", "ms_per_token", "speedup")
_REPLAY = {"name": str, "kind": str, "settings": dict, **dict.fromkeys(_REPLAYED, _MAYBE)}


class RunFolder(NamedTuple):
    """One job of one experiment. `state` is finished, failed, interrupted, running or, without a status, unknown.

    `rows` are those of summary.json, `requests` the records of metrics.jsonl that measure one request, `rounds`,
    `load` and `replay` the objects of their files, `trees` titles and SVGs of a drawing. Empty = not there.
    """

    path: Path
    kind: str
    state: str
    error: str | None
    status: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    requests: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    load: list[dict[str, Any]]
    replay: list[dict[str, Any]]
    trees: list[tuple[str, str]]


def read_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """The runs in the given folders, each a run or a folder of runs (a sweep, a day), in order, none twice.

    Jobs of a sweep come by number. Runs of experiments that SHOWN does not list are left out of a folder of runs; one
    that broke off before it said what it was is not.
    Raises BadInput for a folder that is missing or holds no run, and for a file that is not whole.
    """
    found: dict[Path, RunFolder] = {}
    for given in map(Path, paths):
        if not given.is_dir():
            what = "is a file, not a folder" if given.exists() else "does not exist"
            raise BadInput(f"{given} {what}; give the run folders that experiments print at their end")
        folders = [given] if _is_run(given) else list(_inside(given))
        kinds = {folder: _kind(folder) for folder in folders}
        shown = [folder for folder in folders if kinds[folder] in ("", *SHOWN) or _has_results(folder)]
        if not shown:
            others = ", ".join(sorted(set(kinds.values())))
            held = f"holds only runs of {others}" if kinds else "holds no run"
            raise BadInput(f"{given} {held}; give folders that one of {', '.join(SHOWN)} has left")
        found |= {folder.resolve(): read_run(folder) for folder in shown if folder.resolve() not in found}
    return list(found.values())


def _is_run(folder: Path) -> bool:
    """Also of a run that was killed before it left more than Hydra's own files."""
    return any((folder / name).exists() for name in ("status.json", ".hydra")) or _has_results(folder)


def _has_results(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES)


def _inside(folder: Path, levels: int = 2) -> Iterator[Path]:
    """Runs below a folder, a sweep's jobs by their number."""
    for child in sorted((c for c in folder.iterdir() if c.is_dir()), key=_by_number):
        if _is_run(child):
            yield child
        elif levels > 1 and not child.name.startswith("."):
            yield from _inside(child, levels - 1)


def _by_number(folder: Path) -> tuple[bool, int, str]:
    number = re.match(r"(\d+)_", folder.name)
    return number is None, int(number[1]) if number else 0, folder.name


def read_run(folder: str | Path) -> RunFolder:
    """One run folder as a record. Raises BadInput naming the file, and the line, that cannot be read."""
    folder = Path(folder)
    status, environment = (_object(folder / name) for name in ("status.json", "environment.json"))
    config = _yaml(folder / "config.yaml") or _yaml(folder / ".hydra" / "config.yaml")
    requests = [record for record in _lines(folder / "metrics.jsonl", {}) if "prompt_id" in record[1]]
    for where, record in requests:
        _check(record, _REQUEST, where)
    return RunFolder(
        path=folder,
        kind=_kind(folder),
        state=str(status.get("state", "unknown")),
        error=None if status.get("error") is None else str(status["error"]),
        status=status,
        config=config,
        environment=environment,
        rows=_rows(folder / "summary.json"),
        requests=[record for _, record in requests],
        rounds=[record for _, record in _lines(folder / "rounds.jsonl", _ROUND)],
        load=[record for _, record in _entries(folder / "load.json", _LOAD)],
        replay=_replay(folder / "replay.json"),
        trees=_trees(folder / "rounds.html"),
    )


def _kind(folder: Path) -> str:
    """The experiment's name: from environment.json, or from Hydra's own record if the job ended before it."""
    job = _object(folder / "environment.json").get("job")
    if isinstance(job, dict) and job.get("kind"):
        return str(job["kind"])
    own = _yaml(folder / ".hydra" / "hydra.yaml").get("hydra", {})
    return str(own.get("job", {}).get("config_name") or "")


def _rows(path: Path) -> list[Row]:
    """The rows of summary.json; what an older version did not write is not known."""
    rows = []
    for where, record in _entries(path, _ROW):
        values: dict[str, Any] = {field.name: record.get(field.name) for field in dataclasses.fields(Row)}
        for name in set(values) - set(_ROW) - set(_LISTS):
            _check(values, {name: _MAYBE}, where)
        values |= {name: values[name] or [] for name in _LISTS} | {"ties": values["ties"] or 0}
        if not all(isinstance(v, _MAYBE) for name in _LISTS for v in _listed(values[name])):
            raise BadInput(f"{where} has rates that are no numbers; delete it, or run the experiment again")
        rows.append(Row(**values))
    return rows


def _replay(path: Path) -> list[dict[str, Any]]:
    """The settings of replay.json; one that names no batch is of a single request."""
    found = {where: {"batch": 1} | record for where, record in _entries(path, _REPLAY)}
    for where, record in found.items():
        _check(record, {"batch": int}, where)
    return list(found.values())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value, ""]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} can't be read ({error}); restore it, or run the experiment again") from error


def _json(path: Path, wanted: type) -> Any:
    content = _read(path)
    if content is None:
        return wanted()
    try:
        value = json.loads(content)
    except ValueError as error:
        raise BadInput(
            f"{path} is not JSON ({error}); run the experiment again, or remove the file"
        ) from error
    if not isinstance(value, wanted):
        kind = {list: "a list", dict: "an object"}[wanted]
        raise BadInput(f"{path} should hold {kind}; run the experiment again, or remove the file")
    return value


def _object(path: Path) -> dict[str, Any]:
    return _json(path, dict)


def _entries(path: Path, fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSON list, each with the words that say where it stands."""
    found = [(f"{path}, entry {i},", record) for i, record in enumerate(_json(path, list), 1)]
    for where, record in found:
        _check(record, fields, where)
    return found


def _lines(path: Path, fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSON-lines file, each with the words that say where it stands."""
    found = []
    for number, line in enumerate((_read(path) or "").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number},"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{where} is not JSON; delete that line, or run the experiment again") from error
        _check(record, fields, where)
        found.append((where, record))
    return found


def _check(record: Any, fields: Mapping[str, Any], where: str) -> None:
    if not isinstance(record, dict):
        raise BadInput(f"{where} is not an object; delete it, or run the experiment again")
    for name, kind in fields.items():
        if name not in record or not isinstance(record[name], kind):
            wrong = f"has {record[name]!r} as {name!r}" if name in record else f"lacks {name!r}"
            raise BadInput(f"{where} {wrong}; delete it, or run the experiment again")


def _yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        raise BadInput(f"{path} is not YAML; restore it, or run the experiment again") from error
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _trees(path: Path) -> list[tuple[str, str]]:
    """Title and SVG of every drawn round."""
    found = re.findall(r"<h3>(.*?)</h3>\s*(<svg\b.*?</svg>)", _read(path) or "", re.S)
    return [(unescape(title), svg) for title, svg in found]


def differences(runs: Sequence[RunFolder]) -> dict[str, list[str | None]]:
    """Config keys whose values differ among runs, each with the value in every run; None = not in that config.

    W&B's settings and the schema's own marks are no difference.
    """
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    table = {key: [each.get(key) for each in flat] for key in keys}
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if key == "_target_" or (not prefix and key == "tracking"):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def overrides(run: RunFolder) -> list[str]:
    """What was typed on the run's command line, `key=value` each."""
    job = run.environment.get("job")
    given = job.get("overrides") if isinstance(job, dict) else None
    return [str(item) for item in given] if isinstance(given, list) else []


def labels(runs: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """What tells the runs apart, in a few words each: (`eagle4`, `depth=4`). A single run needs none.

    Runs of one experiment are told apart by the keys that differ among their configs, typed ones first; those of a
    method's own parts that only follow its name are not said unless somebody typed them. Two differences are said, and
    those after them that tell more runs apart; equal configs get their folder's name. `differences` has all of it.
    """
    if len(runs) < 2:
        return [()] * len(runs)
    kinds = list(dict.fromkeys(run.kind for run in runs))
    found: dict[int, tuple[str, ...]] = {}
    for kind in kinds:
        places = [i for i, run in enumerate(runs) if run.kind == kind]
        lead = () if len(kinds) == 1 else (kind or "unknown",)
        found |= {i: (*lead, *words) for i, words in zip(places, _telling([runs[i] for i in places]))}
    words = list(found.values())
    return [
        (*found[i], run.path.name) if words.count(found[i]) > 1 else found[i] for i, run in enumerate(runs)
    ]


def _telling(runs: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    table = differences(runs)
    names = table.pop("name", [None] * len(runs))
    typed = {item.lstrip("+~").partition("=")[0] for run in runs for item in overrides(run)}

    def implied(key: str, values: Sequence[str | None]) -> bool:
        follows = len(set(zip(names, values))) == len(set(names))
        return key.partition(".")[0] in METHOD_GROUPS and key not in typed and follows and len(set(names)) > 1

    kept = {key: values for key, values in table.items() if not implied(key, values)}
    order = sorted(kept, key=lambda key: key not in typed)

    def said(chosen: Sequence[str]) -> list[tuple[str, ...]]:
        given = [[(key, kept[key][i]) for key in chosen] for i in range(len(runs))]
        words = [
            [f"{key.rpartition('.')[2]}={Path(value).name}" for key, value in each if value is not None]
            for each in given
        ]
        return [(*([name] if name is not None else []), *each) for name, each in zip(names, words)]

    chosen = order[:2]
    for key in order[2:]:
        if len(set(said([*chosen, key]))) > len(set(said(chosen))):
            chosen.append(key)
    return said(chosen)
