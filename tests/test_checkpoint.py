"""Drafter checkpoints: what was saved comes back, and anything that does not fit is named."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kit import eagle_weights, tiny_params
from safetensors.numpy import load_file, save_file

from eagle4 import checkpoint
from eagle4.checkpoint import CARD, SPEC, WEIGHTS, Trained, load_drafter, save_drafter
from eagle4.drafters import eagle_net
from eagle4.drafters.eagle import candidates
from eagle4.errors import BadInput
from eagle4.nn.abstract import initialise
from eagle4.specs import EagleSpec, ModelSpec, RopeSpec, TreeSpec

MODEL = ModelSpec("llama", 20, 16, 24, 3, 2, 1, 8, 256)
TARGET = tiny_params(MODEL)
WIDE = dataclasses.replace(
    MODEL, hidden_size=12, num_layers=1, qk_norm=True, qkv_bias=True, rope=RopeSpec("none")
)
SPECS = {
    "eagle1": EagleSpec("concat2", fc_bias=True, window=8),
    "eagle3.1": EagleSpec(taps=(0, 3), fc_norm=True, norm_output=True, draft_vocab=9),
    "own": EagleSpec(norm_before_fc=True, draft_vocab=20, layer=WIDE),
}
SPECS = {name: eagle_net.complete(spec, MODEL) for name, spec in SPECS.items()}


def written(folder, name="eagle3.1", seed=0) -> Trained:
    trained = Trained(SPECS[name], eagle_weights(SPECS[name], MODEL, seed))
    save_drafter(folder, trained, MODEL, TARGET, "A card.")
    return trained


def reading(folder, target=MODEL, params=TARGET) -> str:
    """The one line that refuses a checkpoint."""
    with pytest.raises(BadInput) as caught:
        load_drafter(folder, target, params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder, change):
    """`change` the parsed spec.json in place."""
    about = json.loads((folder / SPEC).read_text())
    change(about)
    (folder / SPEC).write_text(json.dumps(about))


def retensor(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def equal(a, b) -> bool:
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), a, b)
    return all(jax.tree.leaves(same))


def rounded(params, dtype=jnp.float32):
    """Weights as bfloat16 keeps them; ids as they are."""
    return jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16).astype(dtype), params)


@pytest.mark.parametrize("name", SPECS)
def test_what_was_saved_comes_back(tmp_path, name):
    trained = written(tmp_path / "new" / "drafter", name)
    loaded = load_drafter(tmp_path / "new" / "drafter", MODEL, TARGET)
    assert loaded.spec == trained.spec
    assert hash(loaded.spec) == hash(trained.spec)
    assert equal(loaded.params, rounded(trained.params))
    assert {p.name for p in (tmp_path / "new" / "drafter").iterdir()} == {WEIGHTS, SPEC, CARD}
    assert (tmp_path / "new" / "drafter" / CARD).read_text() == "A card."


def test_weights_take_the_dtype_of_the_target_and_the_print_does_not(tmp_path):
    trained = written(tmp_path)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TARGET)
    assert equal(load_drafter(tmp_path, MODEL, half).params, rounded(trained.params, jnp.bfloat16))


def test_names_and_numbers_on_disk_are_plain(tmp_path):
    trained = written(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert {
        "fc",
        "fc_norm.0",
        "fc_norm.1",
        "layer.hidden_norm",
        "layer.q",
        "norm",
        "head",
        "draft_ids",
    } < set(tensors)
    assert {t.dtype for n, t in tensors.items() if n != "draft_ids"} == {np.dtype(ml_dtypes.bfloat16)}
    assert tensors["draft_ids"].tolist() == trained.params["draft_ids"].tolist()


def test_every_tensor_must_be_there_in_its_shape_and_none_else(tmp_path):
    written(tmp_path)
    good = (tmp_path / WEIGHTS).read_bytes()
    for name, tensor in load_file(tmp_path / WEIGHTS).items():
        retensor(tmp_path, lambda t, name=name: t.pop(name))
        assert f"lacks {name}" in reading(tmp_path)
        (tmp_path / WEIGHTS).write_bytes(good)
        retensor(tmp_path, lambda t, name=name: t.update({f"{name}s": t.pop(name)}))
        assert f"lacks {name}" in reading(tmp_path)
        (tmp_path / WEIGHTS).write_bytes(good)
        wrong = np.zeros((*tensor.shape[:-1], tensor.shape[-1] + 1), tensor.dtype)
        retensor(tmp_path, lambda t, name=name, wrong=wrong: t.update({name: wrong}))
        assert f"{name} has shape {list(wrong.shape)}, the spec says {list(tensor.shape)}" in reading(
            tmp_path
        )
        (tmp_path / WEIGHTS).write_bytes(good)
    retensor(tmp_path, lambda t: t.update({"layer.q_bias": np.zeros(16, np.float32)}))
    assert "also has layer.q_bias, which its spec does not name" in reading(tmp_path)


def test_ids_of_a_reduced_head_must_be_increasing_ids_of_the_target(tmp_path):
    for ids in ([3, 2, *range(4, 11)], [3, 3, *range(4, 11)], [-1, *range(8)], [*range(8), 20]):
        written(tmp_path)
        retensor(tmp_path, lambda t, ids=ids: t.update(draft_ids=np.array(ids, np.int32)))
        assert "draft_ids must be increasing ids below 20" in reading(tmp_path)
    retensor(tmp_path, lambda t: t.update(draft_ids=np.arange(9, dtype=np.float32)))
    assert "draft_ids must be increasing ids below 20" in reading(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a["eagle"].pop("window"), "EagleSpec has unknown or missing keys: window"),
        (lambda a: a["eagle"].update(windw=3), "EagleSpec has unknown or missing keys: windw"),
        (lambda a: a["eagle"]["layer"].pop("qk_norm"), "ModelSpec has unknown or missing keys: qk_norm"),
        (lambda a: a["eagle"]["layer"]["rope"].update(base=1), "RopeSpec has unknown or missing keys: base"),
        (lambda a: a["eagle"]["layer"].update(rope=[]), "RopeSpec has unknown or missing keys: []"),
        (lambda a: a.update(eagle=3), "EagleSpec has unknown or missing keys: 3"),
        (lambda a: a["eagle"].update(layer=None), "EagleSpec.layer must be"),
        (lambda a: a["eagle"].update(window="8"), "EagleSpec.window must be int, got '8'"),
        (lambda a: a["eagle"].update(fc_norm=1), "EagleSpec.fc_norm must be bool, got 1"),
        (lambda a: a["eagle"].update(taps=[0, 1.5]), "EagleSpec.taps must be"),
        (lambda a: a["eagle"].update(taps=3), "EagleSpec.taps must be"),
        (lambda a: a["eagle"].update(fusion="taps2"), "eagle.fusion 'taps2' is not known"),
        (lambda a: a["eagle"].update(taps=[0, 4]), "eagle.taps (0, 4) must lie in 0..3"),
        (lambda a: a["eagle"].update(taps=[]), "eagle.taps () must lie in 0..3"),
        (
            lambda a: a["eagle"].update(draft_vocab=21),
            "eagle.draft_vocab=21 is more than the target's 20 ids",
        ),
        (lambda a: a["eagle"]["layer"].update(num_layers=2), "eagle.layer must be one layer"),
        (lambda a: a["eagle"]["layer"].update(windows=[4]), "eagle.layer must be one layer"),
        (lambda a: a["eagle"]["layer"].update(num_kv_heads=0), "num_kv_heads must be positive"),
        (lambda a: a.pop("target_weights"), "must hold format, target, target_weights and eagle, not"),
        (lambda a: a.update(more=1), "must hold format, target, target_weights and eagle, not"),
        (lambda a: a.update(format="eagle4 drafter 2"), "is not of format 'eagle4 drafter 1'"),
        (lambda a: a["target"].pop("rope"), "was trained for another model (rope: None there"),
        (lambda a: a["target"].update(gates=1), "was trained for another model (gates: 1 there, None here)"),
        (lambda a: a.update(target=None), "was trained for another model (its target is not described)"),
    ],
)
def test_each_flaw_of_the_spec_is_named(tmp_path, change, said):
    written(tmp_path)
    edit(tmp_path, change)
    assert said in reading(tmp_path)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    written(tmp_path)
    deeper = dataclasses.replace(MODEL, num_layers=4, rms_norm_eps=1e-6)
    said = reading(tmp_path, deeper, tiny_params(deeper))
    assert "num_layers: 3 there, 4 here" in said
    assert "rms_norm_eps: 1e-05 there, 1e-06 here" in said
    tuned = TARGET | {"norm": TARGET["norm"] * 1.1}
    assert "was trained for other weights of this architecture" in reading(tmp_path, params=tuned)


def test_a_target_of_another_width_needs_an_own_head_and_taps():
    for spec in (EagleSpec("concat2", draft_vocab=20, layer=WIDE), EagleSpec(layer=WIDE)):
        with pytest.raises(BadInput, match="12 wide can't use the head of a target 16 wide"):
            eagle_net.abstract(eagle_net.complete(spec, MODEL), MODEL)


def test_cut_and_missing_files_are_named(tmp_path):
    written(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for size in (0, 4, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / WEIGHTS).write_bytes(whole[:size])
        assert f"{WEIGHTS} is cut or damaged" in reading(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert f"has no {WEIGHTS}; the checkpoint is incomplete" in reading(tmp_path)
    for text in ("", "{", "\x00"):
        (tmp_path / SPEC).write_text(text)
        assert f"{SPEC} is not valid JSON" in reading(tmp_path)
    (tmp_path / SPEC).write_text("[]")
    assert "is not of format" in reading(tmp_path)
    (tmp_path / SPEC).unlink()
    assert f"is not a drafter checkpoint: it has no {SPEC}" in reading(tmp_path)
    assert "is not a drafter checkpoint" in reading(tmp_path / "nowhere")


def test_an_interrupted_write_leaves_a_drafter_that_can_be_read(tmp_path, monkeypatch):
    old = written(tmp_path)
    names = []

    def stop_at(last):
        def write(path, content):
            if path.name == last:
                raise KeyboardInterrupt
            names.append(path.name)
            real(path, content)

        return write

    real = checkpoint.write_atomic
    for last, kept in ((WEIGHTS, 0), (CARD, 1), (SPEC, 2)):
        monkeypatch.setattr(checkpoint, "write_atomic", stop_at(last))
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, seed=kept)
        wanted = old.params if last == WEIGHTS else eagle_weights(old.spec, MODEL, kept)
        assert equal(load_drafter(tmp_path, MODEL, TARGET).params, rounded(wanted))
    # A new folder is a checkpoint only once it is whole.
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "new")
    assert "is not a drafter checkpoint" in reading(tmp_path / "new")
    assert set(names) == {WEIGHTS, CARD}


def test_writing_over_another_drafter_is_refused_before_anything_is_touched(tmp_path):
    old = written(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    # The same shapes with another meaning: old spec and new weights side by side would go unnoticed.
    other = dataclasses.replace(old.spec, norm_output=False)
    with pytest.raises(BadInput, match="holds a drafter of another spec or target; choose another folder"):
        save_drafter(tmp_path, Trained(other, old.params), MODEL, TARGET, "Another card.")
    with pytest.raises(BadInput, match="another spec or target"):
        save_drafter(tmp_path, old, MODEL, TARGET | {"norm": TARGET["norm"] * 1.1}, "Another card.")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    spec = SPECS["eagle1"]
    params = eagle_net.borrow(eagle_weights(spec, MODEL), TARGET)
    with pytest.raises(BadInput, match="also has embed, head, which its spec does not name"):
        save_drafter(tmp_path / "new", Trained(spec, params), MODEL, TARGET, "A card.")
    assert not (tmp_path / "new").exists()


def test_the_targets_rows_are_not_stored_and_score_as_an_own_head_of_the_same_rows(tmp_path):
    """A head reduced to rows of the target's: only their ids are kept."""
    ids = jnp.array([1, 4, 6, 7, 13], jnp.int32)
    rows = eagle_net.complete(EagleSpec("taps", taps=(0, 2), draft_vocab=5, target_rows=True), MODEL)
    own = dataclasses.replace(rows, target_rows=False)
    weights = initialise(eagle_net.abstract(rows, MODEL), jax.random.key(0))
    save_drafter(tmp_path, Trained(rows, {**weights, "draft_ids": ids}), MODEL, TARGET, "card")
    assert "head" not in load_file(tmp_path / WEIGHTS)
    read = load_drafter(tmp_path, MODEL, TARGET)
    params = eagle_net.borrow(read.params, TARGET)
    np.testing.assert_array_equal(params["head"], TARGET["head"][ids])
    x = jax.random.normal(jax.random.key(1), (2, MODEL.hidden_size))
    stored = eagle_net.borrow({**read.params, "head": TARGET["head"][ids]}, TARGET)
    np.testing.assert_array_equal(eagle_net.logits(params, rows, x), eagle_net.logits(stored, own, x))
    picked, probs = candidates(rows, None, TreeSpec("dynamic", 2, 2, 3, 5), params, x)
    assert np.isin(picked, ids).all()
    assert (np.asarray(probs).sum(1) < 1).all()
    with pytest.raises(BadInput, match=r"eagle\.target_rows needs eagle\.draft_vocab"):
        EagleSpec("taps", target_rows=True)
