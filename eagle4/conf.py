"""Specs ↔ Hydra: the schema is made from the frozen specs, and a mistake in a config costs one line.

`schemas.schema` makes a mutable twin of a spec that remembers it in `_target_`; `build` turns the composed node back
into the hashable spec.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import os
import re
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle4 import sweeps, tracking
from eagle4.compilation import keep_compiled
from eagle4.errors import BadInput
from eagle4.schemas import GROUPS, SPECS, schema

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_QUOTE = "and quote a text with special characters twice: 'key=\"a=b, c\"'"
METHOD_KEYS = ("name", "drafter", "tree", "policy", "verifier")


def register() -> None:
    """Puts the schemas into Hydra's ConfigStore as `<group>/schema`, and the resolvers that configs use."""
    for group, spec in GROUPS.items():
        ConfigStore.instance().store(name="schema", group=group, node=schema(spec), provider="eagle4")
    OmegaConf.register_new_resolver("scale", lambda count, share: max(1, round(count * share)), replace=True)
    OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)
    OmegaConf.register_new_resolver("slug", slug, replace=True)
    OmegaConf.register_new_resolver("basename", lambda path: Path(path).name, replace=True)
    OmegaConf.register_new_resolver("token", lambda: secrets.token_hex(3), replace=True, use_cache=True)


def slug(overrides: str) -> str:
    """A folder name that tells overrides apart: readable as far as it fits, then a hash of all of them."""
    readable = re.sub(r"[^A-Za-z0-9=.,_-]+", "-", overrides)[:80]
    return f"{readable}_{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


def build(node: Any) -> Any:
    """The frozen spec of a composed node (or of its plain dict). Raises BadInput for a missing value."""
    values = to_plain(node) if isinstance(node, (DictConfig, ListConfig)) else node
    if isinstance(values, dict) and "_target_" in values:
        if values["_target_"] not in SPECS:
            raise BadInput(f"{values['_target_']!r} is not a spec of eagle4; use one of {', '.join(SPECS)}")
        spec = SPECS[values["_target_"]]
        known = [field.name for field in dataclasses.fields(spec)]
        fields = {key: build(value) for key, value in values.items() if key != "_target_"}
        for key in fields:
            if key not in known:
                raise BadInput(f"unknown key {key!r} in {spec.__name__}{nearest(key, known)}")
        return spec(**fields)
    return tuple(build(item) for item in values) if isinstance(values, list) else values


def to_plain(config: DictConfig | ListConfig) -> Any:
    """The config as dicts and lists, interpolations resolved: what W&B and YAML take."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise BadInput(_one_line(error)) from error


def _config_dir() -> str:
    if not CONFIGS.is_dir():
        raise BadInput(f"no configs at {CONFIGS}; run from a checkout of the repository (pip install -e .)")
    return str(CONFIGS)


@contextlib.contextmanager
def _hydra() -> Iterator[None]:
    register()
    # Inside a running app Hydra is initialised already; it is put back afterwards.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(_config_dir(), version_base="1.3"):
            yield
    finally:
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


def compose(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The composed config of an experiment, for notebooks and tests. Raises BadInput in one line."""
    with _hydra():
        try:
            return hydra.compose(config_name, list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise BadInput(explain_hydra_error(error, config_name)) from error


def compose_method(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """`configs/method/<name>.yaml` with its own drafter, tree and policy, as a plain dict of METHOD_KEYS.

    `verifier` names the acceptance rule at temperature > 0; at 0 every method is verified greedily.
    """
    config = compose("benchmark", [f"method={name}", *overrides])
    return {key: to_plain(config)[key] for key in METHOD_KEYS}


def methods_of(config: DictConfig) -> list[dict[str, Any]]:
    """The method under study, as overridden, then those of `compare` with their own defaults; each once."""
    under_study = to_plain(config)
    compare = under_study["compare"]
    names = compare if isinstance(compare, list) else [str(compare)]
    others = [name for name in dict.fromkeys(names) if name != under_study["name"]]
    return [{key: under_study[key] for key in METHOD_KEYS}, *(compose_method(name) for name in others)]


def output() -> tuple[Path, tracking.Job]:
    """Folder and job of the running Hydra job, for `tracking.open_run`. A sweep's jobs share a group."""
    config = HydraConfig.get()
    folder = Path(config.runtime.output_dir)
    multirun = config.mode == RunMode.MULTIRUN
    group = Path(config.sweep.dir).name if multirun else None
    return folder, tracking.Job(str(config.job.config_name), folder.name, group, tuple(config.overrides.task))


def explain_hydra_error(error: BaseException, config_name: str) -> str:
    """One line for what Hydra says in several: what is wrong, and the nearest name that exists."""
    if isinstance(error, BadInput):
        return str(error)
    chain = _causes(error)
    for cause in chain:
        if isinstance(cause, OverrideParseException):
            return (
                f"can't read the override {cause.override!r}; write key=value, lists as key=[a,b], {_QUOTE}"
            )
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            group, _, option = cause.missing_cfg_file.rpartition("/")
            options = [o for o in cause.options or () if o != "schema"]
            return f"{group or 'config'} {option!r} does not exist{nearest(option, options)}"
    text = "\n".join(str(cause) for cause in chain)
    if match := re.search(r"Ambiguous value for argument '([^']*)'", text):
        return f"{match[1]!r} lists several values; add -m to sweep over them, write [a,b] for one list, {_QUOTE}"
    if match := re.search(r"Could not override '([^'@]*)", text):
        return f"unknown key {match[1]!r}{nearest(match[1], _known_keys(config_name))}"
    if match := re.search(r"Key '([^']*)' not in '([^']*)'", text):
        known = [
            f.name for spec in SPECS.values() if spec.__name__ == match[2] for f in dataclasses.fields(spec)
        ]
        return f"unknown key {match[1]!r} in {match[2]}{nearest(match[1], known)}"
    return _one_line(next((c for c in chain if isinstance(c, OmegaConfBaseException)), chain[0]))


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` and the whole list if it is short; empty when nothing is known."""
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = (
        [key for key in known if key.startswith(name)]
        or difflib.get_close_matches(name, known, 1, 0.5)
        or [leaves[leaf] for leaf in difflib.get_close_matches(name, list(leaves), 1)]
    )
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return guess + (f" (known: {', '.join(known)})" if 0 < len(known) <= 12 else "")


def _known_keys(config_name: str) -> list[str]:
    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key in node if isinstance(node, DictConfig) else ():
            yield f"{prefix}{key}"
            yield from walk(node._get_node(key), f"{prefix}{key}.")

    try:
        with _hydra():
            config = hydra.compose(config_name)
    except (HydraException, OmegaConfBaseException):
        return []
    return [key for key in walk(config, "") if not key.endswith("_target_")] + ["method"]


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    return f"{where}: {lines[0]}" if where else lines[0] if lines else type(error).__name__


def main_guard(task: Callable[[DictConfig], Any], failures: list[int]) -> Callable[[DictConfig], Any]:
    """Wraps a job so that its failure is told at once, written to its status.json, and doesn't stop a sweep.

    BadInput prints one line, any other exception its traceback too; `failures` gets the exit status, 2 or 1.
    """

    @functools.wraps(task)
    def guarded(config: DictConfig) -> Any:
        hydra_config = HydraConfig.get()
        folder = Path(hydra_config.runtime.output_dir)
        multirun, before, job = hydra_config.mode == RunMode.MULTIRUN, tracking.read_status(folder), ""
        if multirun:
            job = f"job {hydra_config.job.num} ({' '.join(hydra_config.overrides.task)}): "
            print(f"{job}{folder}", file=sys.stderr)
            sweeps.listen_for_term()
        try:
            figures = sweeps.finished_before(folder) if multirun else None
            if figures is None:
                figures = sweeps.keep_results(folder, task(config))
            wanted = sweeps.directions(hydra_config.sweeper) if multirun else 0
            return sweeps.objectives(config.get("objectives") or [], figures, wanted) if wanted else None
        except KeyboardInterrupt:
            sweeps.mark(folder, before, "interrupted", "KeyboardInterrupt")
            kept = tracking.count_records(folder)
            print(f"\ninterrupted: {job}kept {kept} record{'s' * (kept != 1)} in {folder}", file=sys.stderr)
            raise
        except Exception as error:
            sweeps.mark(folder, before, "failed", error)
            if not isinstance(error, BadInput):
                traceback.print_exc()
            print(f"error: {job}{error}", file=sys.stderr)
            failures.append(2 if isinstance(error, BadInput) else 1)
            return None

    return guarded


def run_app(task: Callable[[DictConfig], Any], config_name: str) -> None:
    """Runs an experiment under Hydra: `python -m experiments.<name> [-m] key=value …`.

    Exit status: 0, 1 for a bug, 2 for bad input, 130 for an interrupt. In a sweep all jobs run before a
    failure of one of them decides the status.
    """
    failures: list[int] = []
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    # Unless asked to raise, Hydra prints several lines for a mistake in a config; here it gets one.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # A cluster ends a job with SIGTERM: let it keep what it has, as an interrupt does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    sweeps.STARTED.clear()
    sweeps.ENDED.clear()
    try:
        sweeps.refuse_empty(sys.argv)
        sys.argv = sweeps.take_resume(sys.argv)
        register()
        keep_compiled()
        hydra.main(_config_dir(), config_name, "1.3")(main_guard(task, failures))()
    except (BadInput, HydraException, OmegaConfBaseException) as error:
        if full_error == "1":
            raise
        print(f"error: {explain_hydra_error(error, config_name)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # No job's own failure comes here: the launcher lost a worker, or there is a bug around the jobs.
        if full_error == "1" or not sweeps.STARTED:
            raise
        print(f"error: the sweep stopped: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        sys.exit(1)
    finally:
        signal.signal(signal.SIGTERM, before)
        sweeps.tell_stopped()
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    # Jobs of a sweep may have run in other processes; a single run's failure is known here.
    status = sweeps.verdict(sweeps.ENDED) if sweeps.ENDED else min(failures, default=0)
    if status:
        sys.exit(status)
