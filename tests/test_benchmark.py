"""The benchmark app on a tiny model, end to end: what it writes, how it ends, and what it says about mistakes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save_file
from tiny_model import write_model

from eagle4 import answer as ask
from eagle4 import bench, conf, metrics
from eagle4.errors import BadInput
from eagle4.methods import build_method
from eagle4.policy_spec import PolicySpec
from eagle4.prompts import Prompt
from eagle4.specs import DrafterSpec, SamplingSpec, TreeSpec
from eagle4.target.load import load
from eagle4.text import encode_chat, load_text
from experiments import benchmark

NEW = 12
PROMPTS = [
    {"id": "one", "suite": "s", "category": "talk", "turns": ["abc def", "and 12?"]},
    {"id": "two", "suite": "s", "category": "sums", "turns": ["what is 123?"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def write_prompts(path: Path, prompts=PROMPTS) -> Path:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def app(model, tmp_path, monkeypatch, capfd):
    """Runs the app in this process, in a folder of its own: (exit status, stdout, stderr, job folders)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    path = write_prompts(tmp_path / "prompts.jsonl")

    def run(*arguments):
        common = [f"model.source={model}", f"data.path={path}", f"data.max_new_tokens={NEW}", "compare=[]"]
        given = [a.partition("=")[0] for a in arguments]
        common = [c for c in common if c.partition("=")[0] not in given]
        quiet = [] if any(a.startswith("tracking.") for a in arguments) else ["tracking.wandb=disabled"]
        flags = [a for a in arguments if a.startswith("-")]
        overrides = [a for a in arguments if not a.startswith("-")]
        monkeypatch.setattr(sys, "argv", ["benchmark", *flags, *common, *quiet, *overrides])
        code = 0
        try:
            conf.run_app(benchmark.main, "benchmark")
        except SystemExit as stop:
            code = stop.code
        out, err = capfd.readouterr()
        folders = sorted(p.parent for p in tmp_path.glob("runs/**/status.json"))
        return code, out, err, folders

    return run


def read(folder, name):
    return json.loads((folder / name).read_text())


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def check_against_rounds(row, rounds, tokens_of_prompts=None):
    """A row of summary.json says what rounds.jsonl adds up to."""
    own = [
        r
        for r in rounds
        if r["method"] == row["method"] and row["category"] in ("all", category(r["prompt_id"]))
    ]
    committed = sum(r["num_committed"] for r in own)
    assert row["rounds"] == len(own)
    assert row["tokens"] == committed
    assert row["tau_commit"] == pytest.approx(committed / len(own))
    assert row["tau"] == pytest.approx(1 + sum(r["num_accepted"] for r in own) / len(own))
    assert row["verified_nodes"] == pytest.approx(np.mean([r["verified_nodes"] for r in own]))


def category(prompt_id):
    return next(p["category"] for p in PROMPTS if p["id"] == prompt_id)


def test_a_run_leaves_table_summary_rounds_figure_and_its_origin(app, model, monkeypatch):
    timed = []

    def phase_ms(system, params, policy, words, ids, seed, new, capacity):
        timed.append((system.drafter.name, new))
        return {"draft_ms": 1.0, "verify_ms": 2.0, "commit_ms": 3.0}

    monkeypatch.setattr(ask, "phase_ms", phase_ms)
    code, out, err, (folder,) = app("compare=[ar]", "phase_tokens=500")
    assert (code, err) == (0, "")
    # Over no more tokens than an answer may have: else a prompt that just fits would fail after all the work.
    assert timed == [("none", NEW), ("prompt_lookup", NEW)] * 2
    rows, rounds = read(folder, "summary.json"), lines(folder, "rounds.jsonl")
    assert [(r["method"], r["category"]) for r in rows] == [
        (method, name) for method in ("ar", "prompt_lookup") for name in ("talk", "sums", "all")
    ]
    for row in rows:
        check_against_rounds(row, rounds)
        assert row["greedy_identical"] is True
        assert row["prompts"] == (2 if row["category"] == "all" else 1)
        assert row["tokens_per_s"] > 0
        assert (row["draft_ms"], row["verify_ms"], row["commit_ms"]) == (1, 2, 3)
    plain, whole = rows[2], rows[5]
    assert (plain["tau"], plain["speedup_vs_ar"], plain["speedup_low"], plain["speedup_high"]) == (1, 1, 1, 1)
    assert plain["tokens"] == whole["tokens"] == 3 * (NEW - 1), "three turns, the prefill's own token apart"
    assert whole["speedup_low"] <= whole["speedup_vs_ar"] <= whole["speedup_high"]
    assert whole["speedup_vs_ar"] == pytest.approx(whole["tokens_per_s"] / plain["tokens_per_s"])
    assert whole["tau"] > 1.2
    *records, _, summary = lines(folder, "metrics.jsonl")  # the last two sum up a method each
    assert [(r["prompt_id"], r["turn"]) for r in records if r["method"] == "ar"] == [
        ("one", 0),
        ("one", 1),
        ("two", 0),
    ]
    assert summary["summary"]["prompt_lookup/tau"] == whole["tau"]
    for record in records:
        own = [r for r in rounds if all(r[k] == record[k] for k in ("method", "prompt_id", "turn"))]
        assert [r["round"] for r in own] == list(range(record["decode/rounds"]))
        arrays = metrics.Rounds(*(np.array([r[k] for r in own]) for k in metrics.Rounds._fields))
        metrics.check_identities(arrays, record["decode/tokens"])
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert read(folder, "status.json")["state"] == "finished"
    environment = read(folder, "environment.json")
    assert environment["job"]["kind"] == "benchmark"
    assert environment["device"]["platform"] == "cpu"
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.model.source, config.drafter.min_ngram, config.tree.nodes) == (str(model), 3, 8)
    assert "prompt_lookup" in out
    assert f"run folder: {folder}" in out.replace("\n", "")


def test_a_sweep_gives_each_job_its_folder_config_and_wandb_run(app):
    code, _, err, folders = app(
        "-m", "method=ar,prompt_lookup", "sampling.temperature=0,1", "phase_tokens=0", "data.limit=1",
        "tracking.wandb=offline",
    )  # fmt: skip
    assert code == 0, err
    assert len(err.splitlines()) == 4, "one line a job"
    folders = sorted(folders, key=lambda f: int(f.name.partition("_")[0]))
    configs = [OmegaConf.load(folder / "config.yaml") for folder in folders]
    assert [(c.name, c.sampling.temperature) for c in configs] == [
        ("ar", 0),
        ("ar", 1),
        ("prompt_lookup", 0),
        ("prompt_lookup", 1),
    ]
    boards = [read(folder, "environment.json")["wandb"] for folder in folders]
    assert {board["mode"] for board in boards} == {"offline"}
    assert len({board["id"] for board in boards}) == 4
    for folder, config, board in zip(folders, configs, boards):
        assert list(folder.glob(f"wandb/offline-run-*-{board['id']}"))
        assert read(folder, "status.json")["state"] == "finished"
        rows, rounds = read(folder, "summary.json"), lines(folder, "rounds.jsonl")
        assert {row["method"] for row in rows} == {"ar", config.name}
        for row in rows:
            check_against_rounds(row, rounds)
            assert row["greedy_identical"] is (True if config.sampling.temperature == 0 else None)
            assert row["draft_ms"] is None


def test_an_interrupt_keeps_whole_prompts_and_says_so(app, monkeypatch):
    converse = bench.converse

    def impatient(method, words, prompt, *rest):
        if prompt.id == "two":
            raise KeyboardInterrupt
        return converse(method, words, prompt, *rest)

    monkeypatch.setattr(bench, "converse", impatient)
    code, out, err, (folder,) = app("phase_tokens=0")
    assert code == 130
    assert "interrupted: kept 1 of 2 prompts" in out
    assert "Traceback" not in err
    assert read(folder, "status.json")["state"] == "interrupted"
    rows, rounds = read(folder, "summary.json"), lines(folder, "rounds.jsonl")
    assert {row["category"] for row in rows} == {"talk", "all"}
    for row in rows:
        assert row["prompts"] == 1
        check_against_rounds(row, rounds)
    assert {r["prompt_id"] for r in rounds} == {"one"}
    assert (folder / "summary.png").exists()


# --- mistakes ---


def refused(app, *arguments) -> str:
    """The one line that a mistake gets; nothing of a run may be left but its status."""
    code, out, err, folders = app(*arguments)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for folder in folders:
        assert read(folder, "status.json")["state"] == "failed"
        assert {p.name for p in folder.iterdir()} <= {"status.json", ".hydra"}
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tree.dpth=3", "unknown key 'tree.dpth'; did you mean 'tree.depth'?"),
        ("method=prompt_lokup", "method 'prompt_lokup' does not exist; did you mean 'prompt_lookup'?"),
        ("compare=[arr]", "method 'arr' does not exist; did you mean 'ar'?"),
        ("sampling.temperature=-1", "sampling.temperature must be at least 0, got -1"),
        ("sampling.top_p=0", "sampling.top_p must lie in (0, 1], got 0"),
        ("sampling.top_p=1.5", "sampling.top_p must lie in (0, 1], got 1.5"),
        ("model.dtype=float12", "model.dtype 'float12' is not known; use one of float32"),
        ("model.source=nowhere", "'nowhere' does not exist; give a folder"),
        ("data.path=nowhere.jsonl", "no such prompt file: nowhere.jsonl"),
        ("data.max_new_tokens=0", "data.max_new_tokens must be at least 1, got 0"),
        ("data.max_new_tokens=1000", "exceeds the model's context of 1024 positions"),
        ("decode.stops=['']", "decode.stops must be non-empty strings"),
        ("phase_tokens=-1", "phase_tokens must be a whole number, 0 for no phase times, got -1"),
        ("phase_tokens=many", "phase_tokens must be a whole number"),
        ("policy.depth=9", "policy.depth=9 is outside the tree envelope; raise tree.depth from 7"),
        ("drafter.matches=2", "drafter.matches=2 branches from the root, but tree.children=1"),
    ],
)
def test_a_wrong_value_costs_one_line(app, override, said):
    assert said in refused(app, override)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "prompts.jsonl holds no prompt"),
        ('{"id": "a", "suite": "s", "category": "c", "turns": ["x"]}\n{"id": ', "prompts.jsonl:2: not JSON"),
        ('{"id": "a", "suite": "s", "category": "c"}', "prompts.jsonl:1: field 'turns' is missing"),
        (json.dumps(PROMPTS[1] | {"turns": ["a" * 1100]}), "prompt 'two': a prompt of 1138 tokens"),
        (json.dumps(PROMPTS[1] | {"turns": ["a" * 500, "b" * 480]}), "prompt 'two': a prompt of 10"),
    ],
)
def test_a_wrong_prompt_file_costs_one_line(app, tmp_path, content, said):
    (tmp_path / "prompts.jsonl").write_text(content)
    assert said in refused(app)


def test_a_wrong_model_costs_one_line(app, tmp_path):
    folder = write_model(tmp_path / "other", model_type="mamba")
    said = refused(app, f"model.source={folder}")
    assert "mamba" in said
    assert "llama" in said, "the remedy names what is supported"
    tensors = load_file(write_model(folder) / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in refused(app, f"model.source={folder}")


# --- conversations ---


def test_a_turn_has_room_for_answers_whose_text_takes_more_tokens_than_they_had(tmp_path):
    """An answer that is not UTF-8 comes back as U+FFFD, three tokens where there was one."""
    checkpoint = load(write_model(tmp_path, seed=0))
    words = load_text(checkpoint.tokenizer)
    parts = DrafterSpec("none"), TreeSpec(depth=0, nodes=1), PolicySpec(), "greedy"
    method = build_method("ar", *parts, checkpoint.spec, SamplingSpec(), checkpoint.params)
    limits = ask.Limits(40)
    roles = [("user", "a"), ("assistant", ""), ("user", "b")]
    rest = len(encode_chat(words, [{"role": role, "content": content} for role, content in roles])) - 1
    long = "a" * (512 - 2 * 40 - 1 - rest)
    prompt = Prompt("p", "s", "c", (long, "b"))
    size = bench.capacities([method], words, [prompt], limits, 2)["p"]
    assert size == 512
    first, second = bench.converse(method, words, prompt, limits, size, 2, 0)
    assert len(second.prompt_ids) + 40 > size
    assert len(second.answer.ids) == 40
    messages = [{"role": "user", "content": long}, {"role": "assistant", "content": first.answer.text}]
    assert second.prompt_ids == encode_chat(words, [*messages, {"role": "user", "content": "b"}])
    with pytest.raises(BadInput, match=r"prompt 'p': a prompt of .* exceeds the model's context"):
        bench.capacities([method], words, [prompt], ask.Limits(400), 2)
