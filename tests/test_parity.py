"""Our forward pass against transformers: stored goldens always, fresh models with `-m parity`."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from golden.make_parity import CONFIGS, LENGTH, SIZES, run
from safetensors.numpy import save_file

from eagle4.specs import RopeSpec
from eagle4.target.load import Checkpoint, load
from eagle4.target.model import apply
from eagle4.types import KVCache

GOLDEN = Path(__file__).parent / "golden"

forward = jax.jit(apply, static_argnames=("spec", "taps"))


def close(got, wanted, what: str = "") -> None:
    """float32 on both sides, sums in different order; logits here reach about 25, hidden states about 15."""
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=5e-5, err_msg=what)


def read_golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"parity_{name}.npz") as file:
        return dict(file)


def as_checkpoint(golden: dict[str, np.ndarray], folder: Path) -> Checkpoint:
    (folder / "config.json").write_text(str(golden["config"]))
    weights = {k.removeprefix("weight:"): v for k, v in golden.items() if k.startswith("weight:")}
    save_file(weights, folder / "model.safetensors")
    return load(folder)


def causal(batch: int, rows: int) -> np.ndarray:
    return np.broadcast_to(np.tril(np.ones((rows, rows), bool)), (batch, rows, rows))


def prefill(model: Checkpoint, ids: np.ndarray):
    B, N = ids.shape
    taps = tuple(range(model.spec.num_layers + 1))
    positions = np.broadcast_to(np.arange(N, dtype=np.int32), (B, N))
    return forward(
        model.params, spec=model.spec, tokens=ids, positions=positions, attend=causal(B, N), taps=taps
    )


def assert_parity(model: Checkpoint, golden: dict[str, np.ndarray]) -> None:
    out = prefill(model, golden["ids"])
    states = golden["hidden_states"]
    for tap in range(model.spec.num_layers):
        close(out.features[:, :, tap], states[tap], f"tap {tap}")
    close(out.hidden, states[-1], "post-norm")
    close(out.logits, golden["logits"], "logits")


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_equals_transformers(name, tmp_path):
    """Logits, taps and the post-norm state; the last of hidden_states is our last tap after the norm."""
    golden = read_golden(name)
    assert json.loads(str(golden["config"])) == {**SIZES, **CONFIGS[name]}
    model = as_checkpoint(golden, tmp_path)
    assert_parity(model, golden)
    last = np.asarray(prefill(model, golden["ids"]).features[:, :, -1], np.float64)
    rms = np.sqrt((last**2).mean(-1, keepdims=True) + model.spec.rms_norm_eps)
    normed = last / rms * np.asarray(model.params["norm"])
    close(normed, golden["hidden_states"][-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_new_rows_over_a_ragged_cache_equal_transformers(name, tmp_path):
    """15 and 9 tokens in the cache (NaN in the spare slots), then the next 9 of each row at once."""
    golden = read_golden(name)
    model = as_checkpoint(golden, tmp_path)
    ids, start, rows = golden["ids"], np.array([15, 9], np.int32), 9
    full = prefill(model, ids)
    spare = (np.arange(LENGTH) >= start[:, None])[:, None, :, None]
    k = tuple(np.where(spare, np.nan, x).astype(np.float32) for x in full.k)
    v = tuple(np.where(spare, 1e30, x).astype(np.float32) for x in full.v)
    cache = KVCache(k, v, start)  # type: ignore[arg-type]
    at = start[:, None] + np.arange(rows, dtype=np.int32)
    tokens = np.take_along_axis(ids, at, 1)
    out = forward(
        model.params, spec=model.spec, tokens=tokens, positions=at, attend=causal(2, rows), cache=cache
    )
    for row, where in enumerate(at):
        close(out.logits[row], golden["logits"][row, where])
        close(out.hidden[row], golden["hidden_states"][-1, row, where])


PLANTED = {
    "llama": lambda spec: {"rope": RopeSpec(theta=9000.0)},
    "llama_linear": lambda spec: {"rope": RopeSpec(theta=spec.rope.theta)},
    "llama_llama3": lambda spec: {"rope": dataclasses.replace(spec.rope, original_max_position=64)},
    "llama_yarn": lambda spec: {"rope": dataclasses.replace(spec.rope, attention_factor=1.0)},
    "qwen2": lambda spec: {"rms_norm_eps": 1e-3},
    "qwen2_window": lambda spec: {"windows": (5, 5, 5)},
    "qwen3": lambda spec: {"qk_norm": False},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_goldens_notice_a_wrong_spec(name, tmp_path):
    golden = read_golden(name)
    model = as_checkpoint(golden, tmp_path)
    wrong = model._replace(spec=dataclasses.replace(model.spec, **PLANTED[name](model.spec)))
    with pytest.raises(AssertionError):
        assert_parity(wrong, golden)


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_live_transformers(name, tmp_path):
    fresh = run({**SIZES, **CONFIGS[name]}, seed=1000)
    assert_parity(as_checkpoint(fresh, tmp_path), fresh)
