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
    """Sweeps the benchmark in this process: {temperature: (results.json without times, rounds.jsonl)}."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    model = write_model(tmp_path / "tiny")
    prompt = {"id": "one", "suite": "s", "category": "c", "turns": ["abc abc abc"]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")

    def run(folder, temperatures):
        fixed = [f"model.source={model}", "data.path=prompts.jsonl", "data.max_new_tokens=24", "compare=[]"]
        fixed += ["phase_tokens=0", "tracking.wandb=disabled", f"hydra.sweep.dir={folder}"]
        monkeypatch.setattr(sys, "argv", ["benchmark", "-m", *fixed, f"sampling.temperature={temperatures}"])
        conf.run_app(benchmark.main, "benchmark")
        found = {}
        for path in (tmp_path / folder).glob("*/results.json"):
            results = json.loads(path.read_text())
            assert set(OmegaConf.load(path.with_name("config.yaml")).objectives) <= results.keys()
            assert results.keys() > TIMES
            kept = {key: value for key, value in results.items() if key not in TIMES}
            temperature = OmegaConf.load(path.with_name("config.yaml")).sampling.temperature
            found[temperature] = kept, path.with_name("rounds.jsonl").read_text()
        return found

    return run


def test_two_jobs_give_the_same_numbers_in_both_orders(sweep):
    """Both draw: at a temperature above 0 a random state that went on from job to job would show."""
    first = sweep("first", "0.2,0.1")
    assert set(first) == {0.2, 0.1}
    assert first[0.2] != first[0.1]
    assert first[0.2][0]["tau"] > 1
    assert sweep("second", "0.1,0.2") == first
