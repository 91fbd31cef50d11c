"""Every config composes into hashable specs, and a mistake costs one line that names what was meant."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle4 import conf
from eagle4.drafters import DRAFTERS
from eagle4.errors import BadInput
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, RopeSpec, SamplingSpec, TreeSpec
from eagle4.verify import VERIFIERS

PRIMARY = sorted(path.stem for path in conf.CONFIGS.glob("*.yaml"))
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in conf.CONFIGS.glob("*/*.yaml")
    if path.parent.name not in ("experiment", "hydra", "run")
)
APP = """
import os
from eagle4 import conf, tracking
from eagle4.errors import BadInput
from hydra.core.global_hydra import GlobalHydra

def task(config):
    folder, job = conf.output()
    with tracking.open_run(folder, conf.to_plain(config), conf.build(config.tracking), job) as run:
        methods = [m["name"] for m in conf.methods_of(config)]
        run.log({"methods": methods, "tree": str(conf.build(config.tree))})
        run.log({"temperature": conf.build(config.sampling).temperature, "group": job.group})
        run.log({"hydra": GlobalHydra.instance().is_initialized()})
        if config.data.max_new_tokens == 13:
            raise BadInput("13 is unlucky; take 12")
        if config.data.max_new_tokens == 14:
            raise RuntimeError("a bug")
        if config.data.max_new_tokens == 15:
            raise KeyboardInterrupt

conf.run_app(task, "benchmark")
"""


FIVE = RopeSpec(theta=5.0)


@dataclass(frozen=True)
class Nested:
    """A spec with every kind of field that a schema handles."""

    required: int
    rope: RopeSpec = FIVE
    rows: tuple[int, ...] = (1, 2)
    paths: tuple[tuple[int, ...], ...] = ((0,), (0, 1))
    limit: int | None = None
    name: str | None = "x"
    on: bool = False


@pytest.mark.parametrize("name", PRIMARY)
def test_every_experiment_config_composes_and_builds(name):
    config = conf.compose(name)
    conf.to_plain(config)
    for key, spec in conf.GROUPS.items():
        if key in config:
            assert isinstance(conf.build(config[key]), spec)
            hash(conf.build(config[key]))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_builds(group, option):
    experiments = {"train": "train", "retrieval": "train_head", "head": "train_head"}
    added = group in ("costs", "hardware")
    experiment = "calibrate" if added else experiments.get(group, "benchmark")
    config = conf.compose(experiment, [f"{'+' * added}{group}={option}"])
    for key in conf.GROUPS.keys() & config.keys() if group == "method" else [group]:
        assert isinstance(hash(conf.build(config[key])), int)


def test_there_is_something_to_compose():
    assert {"benchmark", "calibrate"} <= set(PRIMARY)
    assert {group for group, _ in OPTIONS} == {*conf.GROUPS, "method"}


@pytest.mark.parametrize("path", sorted(conf.CONFIGS.glob("experiment/*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_file_composes_with_the_command_in_its_head(path):
    (command,) = re.findall(r"python -m experiments\.(\w+) .*\+experiment=(\w+)", path.read_text())
    assert command[1] == path.stem
    config = conf.compose(command[0], [f"+experiment={path.stem}"])
    for key in conf.GROUPS.keys() & config.keys():
        conf.build(config[key])


@pytest.mark.parametrize("spec", [SamplingSpec, TreeSpec, DrafterSpec, PolicySpec])
def test_schema_gives_back_the_spec_with_its_defaults(spec):
    assert conf.build(OmegaConf.structured(conf.schema(spec))) == spec()


def test_schema_handles_every_kind_of_field(monkeypatch):
    monkeypatch.setitem(conf.SPECS, f"{Nested.__module__}.Nested", Nested)
    monkeypatch.setitem(conf.SPECS, "eagle4.specs.RopeSpec", RopeSpec)
    node = OmegaConf.structured(conf.schema(Nested))
    with pytest.raises(BadInput, match="required"):
        conf.build(node)
    changes = {
        "required": 3,
        "rows": [4],
        "paths": [[0], [0, 2], []],
        "limit": 5,
        "name": None,
        "rope": {"factor": 2},
    }
    built = conf.build(OmegaConf.merge(node, changes))
    rope = RopeSpec(theta=5.0, factor=2.0)
    assert built == Nested(3, rope, (4,), ((0,), (0, 2), ()), 5, None)
    assert isinstance(built.rope.factor, float)
    for wrong in ({"required": "a"}, {"rows": ["b"]}, {"paths": [3]}, {"rope": {"theeta": 1}}, {"on": None}):
        with pytest.raises(OmegaConfBaseException):
            OmegaConf.merge(node, wrong)


def test_a_field_no_config_can_hold_is_refused():
    wrong = dataclasses.make_dataclass("Wrong", [("where", complex)], frozen=True)
    with pytest.raises(TypeError, match="complex"):
        conf.schema(wrong)


def test_build_takes_plain_dicts_and_only_known_specs():
    plain = conf.to_plain(conf.compose("benchmark", ["tree.paths=[[0],[0,1]]"]).tree)
    assert conf.build(plain).paths == ((0,), (0, 1))
    with pytest.raises(BadInput, match=r"os\.system"):
        conf.build({"_target_": "os.system", "command": "true"})
    with pytest.raises(BadInput, match="unknown key 'foo' in TreeSpec"):
        conf.build(conf.compose("benchmark", ["+tree.foo=1"]).tree)


def test_methods_name_parts_that_exist_and_ar_drafts_nothing():
    for path in conf.CONFIGS.glob("method/*.yaml"):
        method = conf.compose_method(path.stem)
        assert method["name"] == path.stem
        assert conf.build(method["drafter"]).name in DRAFTERS
        assert method["verifier"] in VERIFIERS
    ar = conf.compose_method("ar")
    assert (conf.build(ar["tree"]).depth, conf.build(ar["tree"]).nodes, ar["drafter"]["name"]) == (
        0,
        1,
        "none",
    )


def test_the_command_line_wins_over_a_methods_own_choices():
    config = conf.compose("benchmark", ["method=prompt_lookup", "tree.depth=7", "sampling=t1"])
    assert (config.tree.depth, config.tree.nodes) == (7, 8)
    assert conf.build(config.sampling).temperature == 1
    config = conf.compose("benchmark", ["method=prompt_lookup", "tree=root"])
    assert (config.drafter.name, config.tree.nodes) == ("prompt_lookup", 1)


def test_compared_methods_keep_their_own_defaults():
    config = conf.compose("benchmark", ["tree.depth=2", "compare=[ar,prompt_lookup]"])
    under_study, ar = conf.methods_of(config)
    assert (under_study["name"], under_study["tree"]["depth"]) == ("prompt_lookup", 2)
    assert ar == conf.compose_method("ar")
    assert conf.methods_of(conf.compose("benchmark", ["compare=ar"]))[1] == ar
    assert conf.compose_method("prompt_lookup", ["tree.depth=9"])["tree"]["nodes"] == 10
    with pytest.raises(BadInput, match="method 'arr' does not exist; did you mean 'ar'"):
        conf.methods_of(conf.compose("benchmark", ["compare=[arr]"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tree.dpth=3", "unknown key 'tree.dpth'; did you mean 'tree.depth'?"),
        ("depth=3", "unknown key 'depth'; did you mean 'tree.depth'?"),
        ("sampling.temp=1", "unknown key 'sampling.temp'; did you mean 'sampling.temperature'?"),
        ("metod=ar", "unknown key 'metod'; did you mean 'method'?"),
        ("method=promptlookup", "method 'promptlookup' does not exist; did you mean 'prompt_lookup'?"),
        ("model=smollm2_135", "model 'smollm2_135' does not exist; did you mean 'smollm2_135m'?"),
        ("tree=chian", "tree 'chian' does not exist; did you mean 'chain'?"),
        ("tree.depth=abc", "tree.depth: Value 'abc' of type 'str' could not be converted to Integer"),
        ("tree.paths=[[0,a]]", "tree.paths[0]: Value 'a' (str) is incompatible with type hint 'int'"),
        ("tree.depth=[3", "can't read the override 'tree.depth=[3'"),
        ("method=ar,prompt_lookup", "add -m to sweep"),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_name(override, message):
    with pytest.raises(BadInput) as caught:
        conf.compose("benchmark", [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not GlobalHydra.instance().is_initialized()


def test_a_typo_in_a_config_file_names_the_key(tmp_path, monkeypatch):
    for path in conf.CONFIGS.rglob("*.yaml"):
        copy = tmp_path / path.relative_to(conf.CONFIGS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("depth: 4", "dpth: 4"))
    monkeypatch.setattr(conf, "CONFIGS", tmp_path)
    with pytest.raises(BadInput, match=r"unknown key 'dpth' in TreeSpec; did you mean 'depth'"):
        conf.compose("benchmark")
    monkeypatch.setattr(conf, "CONFIGS", tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no configs at"):
        conf.compose("benchmark")


def test_folder_names_tell_overrides_apart():
    long = [f"tree.paths=[{'[0],' * 60}[{i}]]" for i in (1, 2)]
    names = [conf.slug(text) for text in ("", "a=1", "a=[1]", "a=(1)", "a/b=x y", *long)]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 100 for name in names)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """Runs the app above in a folder of its own: (folder, completed process)."""

    def run(*arguments):
        folder = tmp_path_factory.mktemp("app")
        (folder / "app.py").write_text(APP)
        command = [sys.executable, "app.py", *arguments, "tracking.wandb=disabled"]
        root = str(Path(conf.__file__).parent.parent)
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": root,
            "JAX_PLATFORMS": "cpu",
            "HOME": str(folder),
        }
        return folder, subprocess.run(
            command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120
        )

    return run


def statuses(folder):
    return [json.loads(path.read_text())["state"] for path in jobs(folder)]


def jobs(folder):
    """status.json of every job, in the order of their numbers."""
    return sorted(folder.glob("runs/**/status.json"), key=lambda p: int(p.parent.name.partition("_")[0]))


def records(status):
    return [json.loads(line) for line in status.with_name("metrics.jsonl").read_text().splitlines()]


def test_a_sweep_over_methods_and_temperatures(app):
    folder, done = app("-m", "method=ar,prompt_lookup", "sampling.temperature=0,1", "compare=[ar]")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 4, "the table of all jobs"
    assert len(done.stderr.splitlines()) == 4, "one line a job"
    found = [records(status) for status in jobs(folder)]
    assert [r[0]["methods"] for r in found] == [
        ["ar"],
        ["ar"],
        ["prompt_lookup", "ar"],
        ["prompt_lookup", "ar"],
    ]
    assert all(r[2]["hydra"] for r in found), "composing inside a job leaves Hydra as it was"
    assert [r[1]["temperature"] for r in found] == [0, 1, 0, 1]
    assert "depth=0" in found[0][0]["tree"]
    assert "depth=7" in found[3][0]["tree"]
    assert len({r[1]["group"] for r in found}) == 1
    assert found[0][1]["group"]


def test_a_failing_job_is_told_and_the_others_go_on(app):
    folder, done = app("-m", "data.max_new_tokens=12,13,14,16")
    assert done.returncode == 1
    assert statuses(folder) == ["finished", "failed", "failed", "finished"]
    assert done.stderr.count("Traceback") == 1
    assert (
        "error: job 1 (data.max_new_tokens=13 tracking.wandb=disabled): 13 is unlucky; take 12" in done.stderr
    )
    assert "a bug" in json.loads(jobs(folder)[2].read_text())["traceback"]


def test_bad_input_is_one_line_and_status_2(app):
    folder, done = app("data.max_new_tokens=13")
    assert (done.returncode, done.stderr, done.stdout) == (2, "error: 13 is unlucky; take 12\n", "")
    (status,) = folder.glob("runs/*/*/status.json")
    assert json.loads(status.read_text())["state"] == "failed"
    _, done = app("tree.dpth=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown key 'tree.dpth'; did you mean 'tree.depth'?\n"


def test_an_interrupt_says_what_was_kept(app):
    folder, done = app("data.max_new_tokens=15")
    assert done.returncode == 130
    assert "interrupted: kept 3 records in " in done.stderr
    assert "Traceback" not in done.stderr
    (status,) = folder.glob("runs/*/*/status.json")
    assert json.loads(status.read_text())["state"] == "interrupted"


@pytest.mark.parametrize(
    ("given", "built"), [("a.jsonl", "a.jsonl"), ("[a.jsonl,b.jsonl]", ("a.jsonl", "b.jsonl"))]
)
def test_prompts_may_come_from_one_file_or_several(given, built):
    assert conf.build(conf.compose("benchmark", [f"data.path={given}"]).data).path == built


def test_a_path_that_is_neither_is_refused():
    with pytest.raises(BadInput, match=r"data\.path must be a file or a list of files"):
        conf.build(conf.compose("benchmark", ["data.path=7"]).data)
