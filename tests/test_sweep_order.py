"""A job's numbers are its own: neither their order nor the jobs before it in the process change them."""

import json
import sys

import pytest
from omegaconf import OmegaConf
from tiny_model import write_model

from eagle4 import conf
from experiments import benchmark

TIMES = {"ms_per_token", "speedup", "tokens_per_s"}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Sweeps the benchmark over prompt files in this process: {file: (results.json without times, rounds.jsonl)}."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    model = write_model(tmp_path / "tiny")
    for name in ("a", "b"):  # the same text: a prompt's name seeds its draws
        prompt = {"id": name, "suite": "s", "category": "c", "turns": ["abababab 1212 abab"]}
        (tmp_path / name).write_text(json.dumps(prompt) + "\n")

    def run(folder, files):
        fixed = [f"model.source={model}", "data.max_new_tokens=48", "sampling.temperature=0.5", "compare=[]"]
        fixed += ["phase_tokens=0", "tracking.wandb=disabled", f"hydra.sweep.dir={folder}"]
        monkeypatch.setattr(sys, "argv", ["benchmark", "-m", *fixed, f"data.path={files}"])
        conf.run_app(benchmark.main, "benchmark")
        found = {}
        for path in (tmp_path / folder).glob("*/results.json"):
            config, results = OmegaConf.load(path.with_name("config.yaml")), json.loads(path.read_text())
            assert set(config.objectives) <= results.keys(), "a sweeper finds what it is to be told"
            assert results.keys() > TIMES
            kept = {key: value for key, value in results.items() if key not in TIMES}
            found[config.data.path] = kept, path.with_name("rounds.jsonl").read_text()
        return found

    return run


def test_two_jobs_give_the_same_numbers_in_both_orders(sweep):
    """Both draw: a random state that went on from job to job would show in their rounds."""
    first = sweep("first", "a,b")
    assert set(first) == {"a", "b"}
    assert all(results["tau"] > 1 for results, _ in first.values())
    assert first["a"][0] != first["b"][0]
    assert sweep("second", "b,a") == first
