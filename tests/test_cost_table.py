"""Cost tables: interpolated exactly, modelled as hand-checked, timed in turn, and read only where they hold."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from kit import TINY, eagle_params, tiny_params
from rich.console import Console

from eagle4 import conf, cost_table, draft_cost, round_cost
from eagle4.cost_table import Source, cached, covers, describe, fingerprint, modelled_fingerprint, read, save
from eagle4.decode import Params
from eagle4.drafters.eagle_net import complete
from eagle4.errors import BadInput
from eagle4.forward_cost import WARMUP, Point
from eagle4.harness import costs, roofline
from eagle4.harness.hardware import Limits, forward_limit_s
from eagle4.harness.roofline import HardwareSpec
from eagle4.methods import Method
from eagle4.policy_spec import PolicySpec
from eagle4.round_cost import Measured, measure, measured
from eagle4.run_specs import CostsSpec
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, RetrievalSpec, System, TreeSpec
from eagle4.target.load import Checkpoint
from eagle4.text import TokenizerSource

MODEL = Checkpoint(TINY, tiny_params(), TokenizerSource("folder", Path(), {}))
EAGLE = complete(EagleSpec(taps=(0, 2), fc_norm=True, norm_output=True), TINY)
LISTS = {"batch": [1, 2], "context": [5], "nodes": [1, 2], "width": [1, 3]}


def method(drafter: DrafterSpec, network=None) -> Method:
    return Method("m", System(TINY, drafter), PolicySpec(), Params(MODEL.params, network))


WITH_NETWORK = method(DrafterSpec("eagle", eagle=EAGLE), eagle_params(EAGLE))
LOOKUP = method(DrafterSpec("prompt_lookup"))


# --- interpolation ---


def oracle(axes, ms, point):
    """One axis after the other in NumPy: linear inside, flat before the first value and after the last."""
    ms = np.asarray(ms, np.float64)
    for axis, x in zip(axes, point):
        if len(axis) == 1:
            ms = ms[0]
            continue
        i = max(i for i in range(len(axis) - 1) if i == 0 or axis[i] <= x)
        u = min(max((x - axis[i]) / (axis[i + 1] - axis[i]), 0), 1)
        ms = (1 - u) * ms[i] + u * ms[i + 1]
    return ms


@pytest.mark.parametrize(
    "axes", [([1, 2, 8], [16, 64, 300], [1, 2, 4, 16]), ([4], [10, 20], [1]), ([1], [1], [1])]
)
def test_interpolation_equals_an_oracle_inside_at_and_beyond_the_points(axes):
    rng = np.random.default_rng(0)
    ms = rng.uniform(0, 3, tuple(map(len, axes)))
    for axis in range(3):
        ms = ms.cumsum(axis)
    grid = costs.grid(*axes, ms)
    at = jax.jit(costs.at)
    for point in [(axes[0][-1], axes[1][0], axes[2][-1]), *rng.uniform(0.5, 400, (60, 3))]:
        np.testing.assert_allclose(at(grid, *point), oracle(axes, ms, point), rtol=2e-5)


def test_making_a_grid_lowers_a_point_to_the_smallest_beyond_it_and_never_raises_one():
    noisy = [[[3.0, 2.0], [1.0, 4.0]], [[2.0, 5.0], [2.0, 1.0]]]
    grid = costs.grid([1, 2], [8, 9], [1, 4], noisy)
    np.testing.assert_array_equal(grid.ms, [[[1, 1], [1, 1]], [[1, 1], [1, 1]]])
    disturbed = costs.grid([1], [8], [1, 2, 3, 8], [[[10.0, 30.0, 12.0, 16.0]]])
    np.testing.assert_array_equal(disturbed.ms, [[[10, 12, 12, 16]]])


@pytest.mark.parametrize(
    ("axes", "ms", "said"),
    [
        (([], [1], [1]), np.zeros((0, 1, 1)), "batch must be positive and increasing"),
        (([1], [2, 2], [1]), np.zeros((1, 2, 1)), "context must be positive and increasing"),
        (([1], [1], [0]), [[[0]]], "size must be positive and increasing"),
        (([1], [1], [1, 2]), [[[0]]], "ms has shape [1, 1, 1], its axes ask for [1, 1, 2]"),
        (([1], [1], [1]), [[[np.nan]]], "must be finite and at least 0"),
        (([1], [1], [1]), [[[-1e-3]]], "must be finite and at least 0"),
    ],
)
def test_a_grid_that_can_not_be_is_refused(axes, ms, said):
    with pytest.raises(BadInput) as caught:
        costs.grid(*axes, ms)
    assert said in str(caught.value)


# --- roofline ---

# The target: q 8×4, k and v 4×4, o 4×8, gate, up and down 6×4, head 10×4; three norms of 4.
HAND = ModelSpec("llama", 10, 4, 6, 1, 2, 1, 4, 64)
MACHINE = HardwareSpec("hand", 10.0, 100.0, 1e6, 0.5, "this test", itemsize=2, devices=3)
# Numbers that a draft step reads, those of them in matrices, and what feeding reads besides. EAGLE-3:
# q 8×8, k and v 4×8, o 4×8, three of 6×4, norms 4 × 4; fc 4×8 and two norms. EAGLE-1: q, k and v as in the target, fc
# 4×8 in every step, one norm.
THREE = complete(EagleSpec(taps=(0, 1), fc_norm=True, norm_output=True), HAND), 232 + 16, 232, 32 + 8, 32
ONE = complete(EagleSpec("concat2"), HAND), 168 + 32 + 4, 168 + 32, 0, 0
REDUCED = (complete(EagleSpec(taps=(0, 1), fc_norm=True, draft_vocab=6, window=5), HAND), *THREE[1:])


@pytest.mark.parametrize(
    ("drafter", "retrieval", "head", "seen"),
    [
        (THREE, None, lambda rows: (40, 2 * 40 * rows), 7),
        (ONE, None, lambda rows: (40, 2 * 40 * rows), 7),
        (REDUCED, None, lambda rows: (24, 2 * 24 * rows), 5),
        # Factors 2×4 and 10×2, and three rows of the head for every row, of which there are but ten.
        (
            THREE,
            RetrievalSpec(2, 3),
            lambda rows: (8 + 20 + 4 * min(3 * rows, 10), 2 * (28 + 12) * rows),
            7,
        ),
    ],
)
@pytest.mark.parametrize("bound", ["bytes", "flops"])
def test_a_modelled_round_equals_hand_numbers(drafter, retrieval, head, seen, bound):
    spec, items, matrices, fed_items, fed_matrices = drafter
    hardware = replace(MACHINE, **({"flops_per_s": 1e9} if bound == "bytes" else {"read_bytes_per_s": 1e9}))
    table = roofline.table(HAND, spec, retrieval, hardware, [2, 5], [7], [1, 4], [1, 3])

    def ms(items, flops):
        return 1e3 * (2 * items / 300 if bound == "bytes" else flops / 30) + 1e3 * 2 * 0.5

    for i, b in enumerate([2, 5]):
        for k, n in enumerate([1, 3]):
            read, score = head(b * n)
            cost = ms(items + b * 8 * seen + read, b * n * (2 * matrices + 32 * seen) + score)
            assert table.step.ms[i, 0, k] == pytest.approx(cost)
        read, score = head(b)
        fed = 2 * (matrices + fed_matrices) + 32 * seen
        cost = ms(items + fed_items + b * 8 * seen + read, b * roofline.FED * fed + score)
        assert table.first.ms[i, 0, 0] == pytest.approx(cost)
        for k, n in enumerate([1, 4]):
            limits = Limits(3 * hardware.read_bytes_per_s, 3 * hardware.flops_per_s)
            limit = forward_limit_s(HAND, b * n, limits, 7, b, itemsize=2)
            assert table.verify.ms[i, 0, k] == pytest.approx(1e3 * (limit + 2 * 0.5))
            assert limit == pytest.approx(
                (ms(168 + 40 + 12 + b * 8 * 7, b * n * (2 * 208 + 32 * 7)) - 1e3) / 1e3
            )


def test_a_drafter_without_a_network_is_free():
    table = roofline.table(HAND, None, None, MACHINE, [1], [7], [1, 4], [1, 3])
    assert float(costs.at(table.step, 9, 9, 9)) == float(costs.at(table.first, 9, 9, 1)) == 0
    with pytest.raises(BadInput, match="retrieval needs a drafter"):
        roofline.table(HAND, None, RetrievalSpec(), MACHINE, [1], [7], [1], [1])


def test_what_does_not_fit_into_memory_is_refused():
    """Target: embedding and head, layer, norms. Drafter: layer and fc, norms. Factors. Keys and values of both."""
    items = 2 * 40 + 168 + 12 + 232 + 32 + 16 + 8 + 2 * (10 + 4) + 5 * 7 * 2 * (4 + 4)
    both = THREE[0], RetrievalSpec(2, 3)
    for there, fits in ((2 * items / 3, True), (2 * items / 3 - 1, False)):
        hardware = replace(MACHINE, memory_bytes=there)
        if fits:
            roofline.table(HAND, *both, hardware, [2, 5], [7], [1], [1])
        else:
            with pytest.raises(BadInput, match=r"batch 5 at context 7 needs .* GB, hardware hand has"):
                roofline.table(HAND, *both, hardware, [2, 5], [7], [1], [1])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("flops_per_s", 0, "hardware.flops_per_s must be positive"),
        ("read_bytes_per_s", float("inf"), "hardware.read_bytes_per_s must be positive"),
        ("memory_bytes", float("nan"), "hardware.memory_bytes must be positive"),
        ("launch_s", -1.0, "hardware.launch_s must be at least 0"),
        ("itemsize", 3, "hardware.itemsize must be 1, 2 or 4"),
        ("devices", 0, "hardware.devices must be at least 1"),
        ("source", " ", "hardware.source must be given"),
    ],
)
def test_hardware_that_can_not_be_is_refused(field, value, said):
    with pytest.raises(BadInput, match=said):
        replace(MACHINE, **{field: value})


@pytest.mark.parametrize("name", sorted(path.stem for path in conf.CONFIGS.glob("hardware/*.yaml")))
def test_every_hardware_names_its_source_and_prices_a_real_model(name):
    hardware = conf.build(conf.compose("calibrate", [f"+hardware={name}"]).hardware)
    assert hardware.name == name
    target = ModelSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_embeddings=True)
    drafter = complete(EagleSpec(fc_norm=True, norm_output=True), target)
    table = roofline.table(target, drafter, None, hardware, [1, 64], [64, 448], [1, 64], [1, 8])
    assert 0 < table.first.ms[0, 0, 0] < table.verify.ms[0, 0, 0]
    assert table.step.ms[0, 0, 0] < 0.5 * table.verify.ms[0, 0, 0]
    assert table.verify.ms[-1, -1, -1] > table.verify.ms[0, 0, 0]


# --- measuring ---


def test_all_points_take_turns_after_their_warm_up(monkeypatch):
    for name in ("jit_forward", "jit_call"):
        monkeypatch.setattr(draft_cost.decode, name, lambda *given: 0)
    told = []
    made = measure(MODEL, WITH_NETWORK, LISTS, 2, told.append)
    expected = [
        Point(part, batch, 5, size)
        for batch in (1, 2)
        for part, sizes in (("verify", (1, 2)), ("first", (1,)), ("step", (1, 3)))
        for size in sizes
    ]
    assert told == [point for point in expected for _ in range(WARMUP)] + expected * 2
    assert len(expected) == round_cost.count(WITH_NETWORK, LISTS)
    assert [grid.ms.shape for grid in made.table] == [(2, 1, 2), (2, 1, 1), (2, 1, 2)]
    assert made.table.step.size.tolist() == [1, 3]


def test_every_part_really_runs():
    made = measure(MODEL, WITH_NETWORK, LISTS | {"batch": [2], "nodes": [1], "width": [3]}, 1, lambda _: None)
    assert all(float(grid.ms.min()) > 0 for grid in made.table)


def test_without_a_network_only_the_target_is_timed():
    for given in (None, LOOKUP):
        made = measure(MODEL, given, LISTS | {"batch": [1], "nodes": [1]}, 1, lambda _: None)
        assert made.table.verify.ms.shape == (1, 1, 1)
        assert [float(grid.ms.sum()) for grid in made.table[1:]] == [0, 0]


def test_a_table_holds_medians_made_monotone_and_the_spread_of_every_point():
    samples = {1: [0.003, 0.001, 0.002], 2: [0.001, 0.001, 0.001], 4: [0.004, 0.004, 0.008]}
    made = measured({Point("verify", 1, 9, n): seconds for n, seconds in samples.items()})
    np.testing.assert_allclose(made.table.verify.ms, [[[1, 1, 4]]])
    np.testing.assert_allclose(made.spread["verify"], [[[0.5, 0, 0.5]]])
    assert made.table.step == made.table.first == costs.free()


def test_a_draft_step_is_timed_for_every_sequence_behind_the_whole_context(monkeypatch):
    called = []
    monkeypatch.setattr(draft_cost.decode, "jit_call", lambda *given: called.append(given))
    network = WITH_NETWORK.params.drafter, WITH_NETWORK.system.drafter, 6
    draft_cost.step_call(*network, 3, 2)()
    draft_cost.first_call(*network, 2)()
    (carry, (ids, probs)), (output, (root_ids, _)) = (jax.eval_shape(*given) for given in called)
    assert (carry.output.shape, ids.shape, probs.shape) == ((2, 3, 32), (2, 3, 3), (2, 3, 3))
    assert (output.shape, root_ids.shape) == ((2, 32), (2, roofline.FED))
    (_, _, state, _, frontier), (_, _, fed, pairs, _) = called
    for each in (state, fed):
        assert each.cache.length.tolist() == [6, 6]
        assert each.cache.k[0].shape == (2, 2, 6, 8)
    assert frontier.attend.tolist() == [[[i == j for j in range(6)] for i in range(3)]] * 2
    assert pairs.num_committed.tolist() == [roofline.FED] * 2


def test_a_context_too_short_to_feed_is_refused():
    with pytest.raises(BadInput, match="context must be at least 4 to time a drafter network, got 3"):
        round_cost.calls(MODEL, WITH_NETWORK, LISTS | {"context": [3, 9]})


def test_a_trees_own_sizes_are_what_is_measured():
    tree = TreeSpec("dynamic", 6, 6, 4, 20, buckets=(4, 8))
    assert round_cost.lists_for(tree, [8, 1, 8], [64]) == {
        "batch": [1, 8],
        "context": [64],
        "nodes": [1, 4, 8, 20],
        "width": [1, 2, 4, 6],
    }


# --- files ---


def example() -> Measured:
    table = costs.CostTable(
        costs.grid([1, 4], [16], [1, 2], [[[1.5, 2.1]], [[3.3, 4.7]]]),
        costs.grid([1, 4], [16], [1], [[[0.25]], [[0.5]]]),
        costs.grid([1, 4], [16], [1, 3], [[[0.1, 0.2]], [[0.3, 0.4]]]),
    )
    return Measured(table, {part: np.full(grid.ms.shape, 0.125) for part, grid in table._asdict().items()})


def equal(one, other) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def test_what_is_written_is_read_back_bit_for_bit(tmp_path):
    made, key, path = example(), fingerprint(MODEL, WITH_NETWORK), tmp_path / "a" / "costs.json"
    save(path, made, key)
    for expected in (key, None):
        table, source = read(path, expected)
        assert equal(table, made.table)
        assert source == Source("measured", str(path))
    assert json.loads(path.read_text())["parts"]["step"]["spread"] == [[[0.125, 0.125]], [[0.125, 0.125]]]
    assert describe(source) == f"costs: measured ({path})"


def edit(part, name, value):
    return lambda content: content["parts"][part].update({name: value})


def drop(*path):
    def change(content):
        for name in path[:-1]:
            content = content[name]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(format="eagle4 costs 0"), "is not of format 'eagle4 costs 1'"),
        (lambda c: c.update(kind="guessed"), "kind must be one of measured, modelled, got 'guessed'"),
        (lambda c: c.update(note=1), "has unknown or missing keys: note"),
        (drop("fingerprint"), "has unknown or missing keys: fingerprint"),
        (drop("fingerprint", "device"), "fingerprint has unknown or missing keys: device"),
        (drop("parts", "first"), "parts has unknown or missing keys: first"),
        (drop("parts", "step", "spread"), "step has unknown or missing keys: spread"),
        (lambda c: c.update(parts=[]), "parts has unknown or missing keys: []"),
        (edit("verify", "ms", [[[1.5, 1.4]], [[3.3, 4.7]]]), "verify: ms falls where"),
        (edit("verify", "ms", [[[3.4, 4.8]], [[3.3, 4.9]]]), "verify: ms falls where"),
        (edit("step", "ms", [[[-0.1, 0.2]], [[0.3, 0.4]]]), "step: cost table: costs must be finite"),
        (edit("step", "ms", [[[0.1, float("nan")]], [[0.3, 0.4]]]), "NaN is not a cost"),
        (edit("step", "ms", [[[0.1, float("inf")]], [[0.3, 0.4]]]), "Infinity is not a cost"),
        (edit("step", "ms", [[[0.1, None]], [[0.3, 0.4]]]), "step: ms must be a list of numbers, 3 deep"),
        (edit("step", "ms", [[[0.1, 0.2]], [[0.3]]]), "step: ms must be a list of numbers, 3 deep"),
        (edit("step", "ms", [[[0.1, 0.2]]]), "ms has shape [1, 1, 2], its axes ask for [2, 1, 2]"),
        (edit("verify", "batch", [4, 1]), "verify: cost table: batch must be positive and increasing"),
        (edit("verify", "size", ["1", "2"]), "verify: size must be a list of numbers, 1 deep"),
        (edit("verify", "size", [2, 3]), "sizes of verify must begin with 1"),
        (edit("step", "spread", [[[0.1, 0.1]]]), "spread must be at least 0, one number for each of ms"),
        (edit("step", "spread", [[[0.1, -0.1]], [[0, 0]]]), "spread must be at least 0"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_file_that_is_not_a_cost_table_is_refused_and_never_repaired(tmp_path, change, said, force):
    key, path = fingerprint(MODEL, WITH_NETWORK), tmp_path / "costs.json"
    save(path, example(), key)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput) as caught:
        read(path, key, force)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'"eagle4 costs 1"'])
def test_bytes_that_are_no_table_cost_one_line(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"experiments\.calibrate"):
        read(path, None)
    with pytest.raises(BadInput, match="no cost table at"):
        read(tmp_path / "nowhere.json", None)


def elsewhere(**changes):
    def change(key):
        for name, value in changes.items():
            group, _, leaf = name.partition("__")
            key[group][leaf] = value
        return key

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (elsewhere(device__cpu_model="Abacus"), "device.cpu_model (Abacus there"),
        (elsewhere(device__eagle4="0.0.1", target__num_layers=9), "device.eagle4 (0.0.1 there"),
        (elsewhere(target__hidden_size=64), "target.hidden_size (64 there, 32 here)"),
        (elsewhere(drafter__retrieval={"rank": 8}), "drafter.retrieval"),
        (elsewhere(drafter__name="none", drafter__eagle=None), "drafter.name (none there, eagle here)"),
    ],
)
def test_another_machine_model_or_drafter_is_named_and_refused_unless_forced(tmp_path, change, named):
    here, path = fingerprint(MODEL, WITH_NETWORK), tmp_path / "costs.json"
    save(path, example(), change(json.loads(json.dumps(here))))
    with pytest.raises(BadInput) as caught:
        read(path, here)
    assert f"was made for another {named}" in str(caught.value)
    assert "experiments.calibrate" in str(caught.value)
    assert "costs.force=true" in str(caught.value)
    table, source = read(path, here, force=True)
    assert equal(table, example().table)
    assert source.forced
    assert source.differences[0] == named.partition(" ")[0]
    assert "forced although" in describe(source)


def test_a_modelled_table_holds_for_any_machine_but_not_for_another_target(tmp_path):
    path = tmp_path / "costs.json"
    save(path, example(), modelled_fingerprint(MACHINE, TINY, WITH_NETWORK.system.drafter), "modelled")
    assert json.loads(path.read_text())["fingerprint"]["hardware"]["name"] == "hand"
    assert read(path, fingerprint(MODEL, WITH_NETWORK))[1] == Source("modelled", str(path))
    with pytest.raises(BadInput, match=r"another drafter\.name \(eagle there, prompt_lookup here\)"):
        read(path, fingerprint(MODEL, LOOKUP))


# --- the user's own tables ---


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Measuring without a clock, in a cache folder of its own: the lists that were measured."""
    monkeypatch.setattr(cost_table, "folder", lambda: tmp_path)
    asked = []

    def make(model, method, lists, repeats, tell):
        asked.append(lists)
        sizes = {"verify": lists["nodes"]}
        if method is WITH_NETWORK:
            sizes |= {"first": [1], "step": lists["width"]}
        found = [
            Point(part, b, c, n)
            for part in sizes
            for b in lists["batch"]
            for c in lists["context"]
            for n in sizes[part]
        ]
        return measured({point: [0.001 * point.size * repeats] for point in found})

    def run(method, lists):
        return cached(MODEL, method, lists, 3, Console(quiet=True), make)

    return run, asked, tmp_path


def test_a_table_is_measured_once_for_each_drafter(fake):
    run, asked, folder = fake
    table, source = run(WITH_NETWORK, LISTS)
    assert float(table.step.ms[0, 0, 1]) == pytest.approx(9)
    again, same = run(WITH_NETWORK, LISTS)
    smaller, _ = run(WITH_NETWORK, LISTS | {"batch": [2], "width": [2]})
    assert asked == [LISTS]
    assert equal(again, table)
    assert equal(smaller, table)
    assert same == source == Source("measured", str(next(folder.iterdir())))
    run(LOOKUP, LISTS)
    assert len(asked) == len(list(folder.iterdir())) == 2


def test_a_table_that_is_too_small_grows(fake):
    run, asked, folder = fake
    run(WITH_NETWORK, LISTS)
    table, _ = run(WITH_NETWORK, {"batch": [4], "context": [8, 5], "nodes": [1], "width": [1]})
    assert asked[1] == {"batch": [1, 2, 4], "context": [5, 8], "nodes": [1, 2], "width": [1, 3]}
    assert covers(table, WITH_NETWORK, LISTS)
    assert not covers(table, WITH_NETWORK, LISTS | {"batch": [1, 5]})
    assert not covers(table, WITH_NETWORK, LISTS | {"context": [4]})
    assert not covers(table, WITH_NETWORK, LISTS | {"nodes": [1, 4]})
    assert not covers(table, WITH_NETWORK, LISTS | {"width": [4]})
    assert len(list(folder.iterdir())) == 1


def test_the_width_of_a_drafter_without_a_network_is_always_covered(fake):
    run, asked, _ = fake
    run(LOOKUP, LISTS)
    run(LOOKUP, LISTS | {"width": [64]})
    assert len(asked) == 1


def test_a_damaged_cached_table_is_measured_again(fake):
    run, asked, folder = fake
    run(WITH_NETWORK, LISTS)
    (path,) = folder.iterdir()
    path.write_text("{")
    table, _ = run(WITH_NETWORK, LISTS)
    assert len(asked) == 2
    assert equal(read(path, fingerprint(MODEL, WITH_NETWORK))[0], table)


@pytest.mark.parametrize("changes", [{"table": ""}, {"table": "hardware:"}, {"repeats": 0}])
def test_costs_that_can_not_be_asked_for_are_refused(changes):
    with pytest.raises(BadInput, match=f"costs.{next(iter(changes))}"):
        CostsSpec(**changes)
