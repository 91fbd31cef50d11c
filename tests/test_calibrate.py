"""Timings are taken in turns and waited for, limits follow from bytes and operations, and the app tells the truth."""

import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import TINY, eagle_weights, tiny_params
from safetensors.numpy import save_file

from eagle4 import conf, cost_table, forward_cost
from eagle4.checkpoint import Trained, save_drafter
from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.harness import clock, hardware
from eagle4.harness.hardware import Limits, forward_limit_s, measured_limits, weight_bytes
from eagle4.specs import EagleSpec, ModelSpec
from eagle4.target import load as reading
from eagle4.target import model as target
from eagle4.target.load import LAYER_NAMES, TOP_NAMES
from eagle4.text import TokenizerSource
from experiments import calibrate


def ticking(steps):
    """A clock that moves on by the next of `steps` between two readings, and stands still outside a timing."""
    now, steps, reading = 0.0, itertools.cycle(steps), itertools.cycle((False, True))

    def read():
        nonlocal now
        now += next(steps) if next(reading) else 0.0
        return now

    return read


# --- clock ---


def test_functions_take_turns_after_the_warm_up_and_only_calls_are_timed():
    seen, told = [], []
    functions = {name: (lambda name=name: seen.append(name)) for name in "ab"}
    times = clock.interleaved(functions, 3, 2, ticking([1, 10, 2, 20, 3, 30]), told.append)
    assert "".join(seen) == "aabb" + "ababab"
    assert told == seen
    assert times == {"a": [1, 2, 3], "b": [10, 20, 30]}


def test_a_result_is_waited_for_inside_the_timing(monkeypatch):
    log = []
    monkeypatch.setattr(clock.jax, "block_until_ready", lambda x: log.append(f"wait {x}"))

    def read():
        log.append("clock")
        return 0.0

    clock.interleaved({"f": lambda: log.append("call") or 7}, 1, 1, read)
    assert log == ["call", "wait 7", "clock", "call", "wait 7", "clock"]


def test_median_and_spread():
    assert clock.median([3, 1, 100]) == 3
    assert clock.spread([1, 2, 3, 4, 5]) == (4 - 2) / 3
    assert clock.spread([2, 2, 2]) == 0


@pytest.mark.parametrize(("repeats", "warmup"), [(0, 2), (-1, 2), (1, -1)])
def test_a_timing_needs_a_repeat(repeats, warmup):
    with pytest.raises(BadInput, match="repeats"):
        clock.interleaved({"f": lambda: 0}, repeats, warmup)


# --- hardware ---


def test_limits_are_the_best_try_of_any_kind():
    # Reading: 3 ways × 2 tries, the best 0.25 s; then float32 and bfloat16 products × 2 tries, the best 0.5 s.
    read = ticking([4, 1, 2, 3, 0.25, 5, 8, 0.5, 9, 1])
    limits = measured_limits(jnp.bfloat16, 2, matrix_bytes=2**20, order=64, clock=read)
    assert limits == Limits(2**20 / 0.25, 2 * 64**3 / 0.5)


# L = 1, D = 4, F = 6, H = 2, G = 1, E = 4, V = 10: q 8×4, k and v 4×4, o 4×8, gate, up and down 6×4, head 10×4.
HAND = ModelSpec("llama", 10, 4, 6, 1, 2, 1, 4, 64)
MATRICES = 32 + 16 + 16 + 32 + 3 * 24 + 40
NORMS = 3 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_limit_equals_hand_numbers(tied):
    spec = ModelSpec(**{**vars(HAND), "tie_embeddings": tied})
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), target.abstract(spec))
    assert weight_bytes(params) == 4 * (MATRICES + NORMS)
    # Keys and values: batch 3 × context 5 × (2 · G · E = 8); scores and mixing: 4 · H · E = 32 a row and slot.
    read, flops = 4 * (MATRICES + NORMS + 3 * 5 * 8), 6 * (2 * MATRICES + 5 * 32)
    assert forward_limit_s(spec, 6, Limits(10.0, 1e9), 5, batch=3) == pytest.approx(read / 10)
    assert forward_limit_s(spec, 6, Limits(1e9, 10.0), 5, batch=3) == pytest.approx(flops / 10)
    half = forward_limit_s(spec, 6, Limits(10.0, 1e9), 5, batch=3, itemsize=2)
    assert half == pytest.approx(read / 20)


def test_a_window_bounds_what_is_read():
    windowed = ModelSpec(**{**vars(HAND), "windows": (3,)})
    slow = Limits(10.0, 1e9)
    assert forward_limit_s(windowed, 1, slow, 50) == forward_limit_s(HAND, 1, slow, 3)
    assert forward_limit_s(windowed, 1, slow, 2) == forward_limit_s(HAND, 1, slow, 2)


def test_products_are_scaled_to_all_layers():
    # 2 layers: q and o are 4 matrices of 32 × 32 float32 (4096 bytes), of which 2 fill the stack.
    found = hardware.product_times(tiny_params(), [2], 1, 0, stack_bytes=8192, clock=ticking([0.5, 0.25]))
    by_kind = {row["weights"]: row for row in found}
    assert {kind: tuple(row["shape"]) for kind, row in by_kind.items()} == {
        "q, o": (32, 32),
        "k, v": (16, 32),
        "gate, up": (48, 32),
        "down": (32, 48),
        "head": (48, 32),
    }
    ms = {kind: (row["dense_ms"], row["ordinary_ms"]) for kind, row in by_kind.items()}
    assert (ms["q, o"], ms["down"], ms["head"]) == ((1000, 500), (500, 250), (500, 250))


# --- the app ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model as a checkpoint folder."""
    path, params = tmp_path_factory.mktemp("tiny"), tiny_params()
    tensors = {TOP_NAMES[key]: np.asarray(params[key]) for key in TOP_NAMES}
    for i, layer in enumerate(params["layers"]):
        tensors |= {LAYER_NAMES[key].format(i=i): np.asarray(value) for key, value in layer.items()}
    save_file(tensors, path / "model.safetensors")
    config = {
        "model_type": "llama",
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.ffn_size,
        "num_hidden_layers": TINY.num_layers,
        "num_attention_heads": TINY.num_heads,
        "num_key_value_heads": TINY.num_kv_heads,
        "head_dim": TINY.head_dim,
        "max_position_embeddings": TINY.max_position,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def run(monkeypatch, folder, where, *overrides):
    monkeypatch.chdir(where)
    monkeypatch.setattr(hardware, "SIZES", dict.fromkeys(hardware.SIZES, (2**20, 64)))
    monkeypatch.setattr(cost_table, "folder", lambda: where / "cache")
    command = ["calibrate", f"model.source={folder}", "tracking.wandb=disabled", *overrides]
    monkeypatch.setattr(sys, "argv", command)
    conf.run_app(calibrate.main, "calibrate")


def test_the_app_writes_what_it_measured(folder, tmp_path, monkeypatch, capsys):
    lists = ("nodes=[8,1]", "batch=[1,3]", "context=[7]", "repeats=3")
    run(monkeypatch, folder, tmp_path, *lists)
    (path,) = tmp_path.glob("runs/*/*/calibrate.json")
    result = json.loads(path.read_text())
    limits = Limits(**result["limits"])
    assert min(limits) > 0
    assert result["weight_bytes"] == weight_bytes(tiny_params())
    assert result["device"]["platform"] == "cpu"
    assert [(r["batch"], r["nodes"], r["rows"]) for r in result["forward"]] == [
        (1, 1, 1),
        (1, 8, 8),
        (3, 1, 3),
        (3, 8, 24),
    ]
    for one, row in zip([result["forward"][i] for i in (0, 0, 2, 2)], result["forward"]):
        assert row["context"] == 7
        assert row["forward_ms"] == sorted(row["samples_ms"])[1]
        assert row["ratio"] == pytest.approx(row["forward_ms"] / one["forward_ms"])
        limit_ms = 1e3 * forward_limit_s(TINY, row["rows"], limits, 7, row["batch"])
        assert row["limit_ms"] == pytest.approx(limit_ms)
        assert row["over_limit"] == pytest.approx(row["forward_ms"] / limit_ms)
    assert result["forward"][0]["ratio"] == 1
    eight, one = result["targets"][:2]
    assert (eight["value"], eight["reached"]) == (
        result["forward"][1]["ratio"],
        result["forward"][1]["ratio"] <= 1.6,
    )
    first = result["forward"][0]
    assert first["read_ms"] > 0
    assert one["value"] == pytest.approx(first["forward_ms"] / first["read_ms"])
    assert [row["rows"] for row in result["products"]] == [1, 8] * 5
    assert path.with_name("calibrate.png").stat().st_size > 10_000
    assert json.loads(path.with_name("status.json").read_text())["state"] == "finished"
    assert len(path.with_name("metrics.jsonl").read_text().splitlines()) == 4 + 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "time(8)/time(1) ≤ 1.6" in printed.out
    assert "forward pass, batch 3, context 7" in printed.out
    assert "draft parts" not in printed.out
    (cached,) = tmp_path.glob("cache/*.json")
    assert cached.read_text() == path.with_name("costs.json").read_text()
    table, source = cost_table.read(cached, None)
    assert source.kind == "measured"
    medians = [row["forward_ms"] for row in result["forward"]]
    lowered = np.minimum.accumulate(np.reshape(medians, (2, 2))[::-1, ::-1], 0)
    lowered = np.minimum.accumulate(lowered, 1)[::-1, ::-1]
    np.testing.assert_allclose(table.verify.ms[:, 0], lowered, rtol=1e-6)
    assert [float(grid.ms.sum()) for grid in (table.first, table.step)] == [0, 0]


def test_with_a_method_its_drafter_is_timed_too(folder, tmp_path, monkeypatch, capsys):
    model = reading.load(folder)
    spec = eagle_net.complete(EagleSpec(fc_norm=True, norm_output=True), model.spec)
    save_drafter(
        tmp_path / "net", Trained(spec, eagle_weights(spec, model.spec)), model.spec, model.params, ""
    )
    lists = ("nodes=[1]", "batch=[2]", "context=[7]", "width=[3,1]", "repeats=3")
    run(monkeypatch, folder, tmp_path, "method=eagle3_1", f"drafter.checkpoint={tmp_path}/net", *lists)
    (path,) = tmp_path.glob("runs/*/*/costs.json")
    table, _ = cost_table.read(path, None)
    assert json.loads(path.read_text())["fingerprint"]["drafter"]["name"] == "eagle"
    assert [grid.size.tolist() for grid in table] == [[1], [1], [1, 3]]
    assert min(float(grid.ms.min()) for grid in table) > 0
    logged = [json.loads(line) for line in path.with_name("metrics.jsonl").read_text().splitlines()]
    drafted = [line for line in logged if "part" in line]
    assert [(line["part"], line["width"]) for line in drafted] == [("first", 1), ("step", 1), ("step", 3)]
    for line in drafted:
        assert line["share"] == pytest.approx(line["ms"] / logged[0]["forward_ms"])
    assert "draft parts of eagle3_1" in capsys.readouterr().out


def test_the_forward_sees_the_whole_context_and_its_own_chain(monkeypatch):
    calls = []
    monkeypatch.setattr(forward_cost.decode, "jit_forward", lambda *arguments: calls.append(arguments))
    model = forward_cost.Checkpoint(TINY, tiny_params(), TokenizerSource("folder", Path(), {}))
    for call in forward_cost.forward_calls(model, 2, 5, [1, 3]).values():
        call()
    _, spec, tokens, positions, attend, cache = calls[1]
    assert spec == TINY
    assert tokens.shape == (2, 3)
    np.testing.assert_array_equal(positions, [[5, 6, 7]] * 2)
    np.testing.assert_array_equal(attend, [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]] * 2)
    np.testing.assert_array_equal(cache.length, [5, 5])
    entries = np.stack([*cache.k, *cache.v])
    assert entries.shape == (4, 2, 2, 5, 8)
    assert len(np.unique(entries)) == entries.size, "every layer has entries of its own"
    assert np.isfinite(entries).all()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nodes=[]", "nodes must list whole numbers of at least 1, like nodes=[1,8]; got []"),
        ("batch=[]", "batch must list"),
        ("context=[0]", "context must list"),
        ("nodes=[1,a]", "nodes must list"),
        ("nodes=4", "nodes must list"),
        ("nodes=[1,257]", "nodes must lie in 1..256, got 257"),
        ("width=[0]", "width must list"),
        ("width=[65]", "width must lie in 1..64, got 65"),
        ("method=eagle3_1", "is not a drafter checkpoint"),
        ("nodes=[2,4]", "nodes must contain 1"),
        ("repeats=-1", "repeats must be at least 1, got -1"),
        ("repeats=many", "repeats must be at least 1, got many"),
        ("context=[505]", "context 505 + nodes 8 exceeds the model's 512 positions"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(
    folder, tmp_path, monkeypatch, capsys, override, message
):
    monkeypatch.setattr(forward_cost, "measure", None)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, folder, tmp_path, "nodes=[1,8]", override)
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert message in printed


def test_a_target_that_was_not_measured_is_not_reached():
    row = {"batch": 1, "context": 9, "nodes": 1, "ratio": 1.0, "forward_ms": 3.0}
    eight, one = forward_cost.targets([row | {"read_ms": 2.0}])
    assert (eight["value"], eight["reached"]) == (None, None)
    assert (one["value"], one["reached"]) == (1.5, True)


def test_a_busy_machine_is_told(monkeypatch, capsys):
    console = forward_cost.Console(width=200)
    monkeypatch.setattr(forward_cost.os, "cpu_count", lambda: 4)
    for load, warned in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(forward_cost.os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        assert forward_cost.warn_if_busy(console) == load
        assert ("busy (load average 2.1 on 4 cores)" in capsys.readouterr().out) == warned
