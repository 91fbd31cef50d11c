"""Published drafters are read as their own algebra says, and every way of misreading one shows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_kit import (
    CASES,
    FULL,
    LLAMA3,
    QWEN,
    REDUCED,
    TARGET,
    V,
    agree,
    change,
    checkpoint,
    override_of,
    publish,
    read,
)

from eagle4.drafters import eagle_net as net
from eagle4.errors import BadInput
from eagle4.interop import layer_ids, vocab_map
from eagle4.interop.read import read_drafter
from eagle4.specs import RopeSpec

# --- golden logits ---


@pytest.mark.parametrize("case", CASES)
def test_a_published_drafter_computes_what_its_tensors_say(case, tmp_path):
    folder = checkpoint(tmp_path / "drafter", case)
    spec, params = read(folder, override_of(case))
    wanted = jax.tree.map(lambda leaf: leaf.shape, net.abstract(spec, TARGET))
    assert {k: v for k, v in jax.tree.map(jnp.shape, params).items() if k != "draft_ids"} == wanted
    assert net.complete(spec, TARGET) == spec
    assert ("draft_ids" in params) == (0 < spec.draft_vocab < V)
    agree(folder, spec, params)


def swapped_inputs(spec, params):
    """Embedding and state in the wrong order."""
    half = spec.layer.hidden_size
    if spec.fusion == "concat2":
        return spec, params | {"fc": jnp.roll(params["fc"], half, axis=1)}
    layer = params["layer"] | {name: jnp.roll(params["layer"][name], half, axis=1) for name in "qkv"}
    return spec, params | {"layer": layer}


def plain_recurrence(spec, params):
    return replace(spec, norm_output=not spec.norm_output), params


def offsets_as_ids(spec, params):
    return spec, params | {"draft_ids": params["draft_ids"] - jnp.arange(len(params["draft_ids"]))}


def taps_one_off(spec, params):
    return replace(spec, taps=tuple(tap - 1 for tap in spec.taps)), params


def residual_of_the_other_kind(spec, params):
    return replace(spec, norm_before_residual=not spec.norm_before_residual), params


def norms_exchanged(spec, params):
    layer = params["layer"]
    return spec, params | {
        "layer": layer | {"attn_norm": layer["hidden_norm"], "hidden_norm": layer["attn_norm"]}
    }


def default_rope(spec, params):
    return replace(spec, layer=replace(spec.layer, rope=RopeSpec(theta=spec.layer.rope.theta))), params


@pytest.mark.parametrize(
    ("case", "bug"),
    [
        ("eagle1", swapped_inputs),
        ("eagle3", swapped_inputs),
        ("eagle3", plain_recurrence),
        ("eagle3.1", plain_recurrence),
        ("eagle3", offsets_as_ids),
        ("eagle3", taps_one_off),
        ("speculators", taps_one_off),
        ("eagle3", residual_of_the_other_kind),
        ("speculators", residual_of_the_other_kind),
        ("eagle3", norms_exchanged),
        ("eagle3, wide, llama3", default_rope),
        ("speculators, llama3", default_rope),
    ],
)
def test_a_planted_bug_shows_in_the_logits(case, bug, tmp_path):
    folder = checkpoint(tmp_path / "drafter", case)
    with pytest.raises(AssertionError, match="tolerance"):
        agree(folder, *bug(*read(folder, override_of(case))))


# --- conventions ---


@pytest.mark.parametrize(
    ("layout", "ids", "taps"),
    [
        ("sglang", [1, 3, 4], (2, 4, 5)),
        ("speculators", [2, 4, 5], (2, 4, 5)),
        ("sglang", None, (2, 4, 5)),
        ("speculators", None, (2, 4, 5)),
        ("sglang", [-1, 6, 7], (0, 7, 8)),
        ("speculators", [0, 7, 8], (0, 7, 8)),
    ],
)
def test_output_ids_and_input_ids_name_the_same_taps(layout, ids, taps, tmp_path):
    spec, _ = read(publish(tmp_path / "drafter", layout, ids=ids, **REDUCED))
    assert spec.taps == taps


def test_layer_ids_that_cannot_be_meant_are_refused(tmp_path):
    for i, ids in enumerate(([2, 2, 5], [1, 3, 9], [1, 3, "4"], 3)):
        with pytest.raises(BadInput, match=layer_ids.KEY):
            read(publish(tmp_path / str(i), "speculators", ids=ids, **REDUCED))
    with pytest.raises(BadInput, match="no default"):
        layer_ids.published_default(6)
    assert layer_ids.published_default(32) == layer_ids.from_output_ids([1, 15, 28])
    folder = publish(tmp_path / "flat", "sglang", **REDUCED)
    with pytest.raises(BadInput, match="only inside eagle_config"):
        read(change(folder, lambda c: c.update({layer_ids.KEY: [2, 4, 5]})))
    folder = publish(tmp_path / "aux", "sglang", ids=[1, 2, 3], **REDUCED)
    with pytest.raises(BadInput, match="use_aux_hidden_state"):
        read(change(folder, lambda c: c["eagle_config"].update(use_aux_hidden_state=False)))


def test_d2t_holds_offsets():
    marks = np.isin(np.arange(12), [2, 5, 7, 9])
    got = vocab_map.to_ids(np.array([2, 4, 5, 6]), marks, "x")
    assert (got.tolist(), got.dtype) == ([2, 5, 7, 9], np.int32)
    published = vocab_map.to_published(got, 12)
    assert (published["d2t"].tolist(), published["d2t"].dtype) == ([2, 4, 5, 6], np.int64)
    np.testing.assert_array_equal(published["t2d"], marks)


@pytest.mark.parametrize(
    ("d2t", "ids", "message"),
    [
        ([0, 1, 2, 3], [0, 2, 4, 6], "never filled in"),
        ([2, 5, 7, 9], [2, 5, 7, 9], "must hold offsets"),
        ([2, 4, 5, 9], [2, 5, 7, 12], "below 12"),
        ([2, 4, 3, 6], [2, 5, 9], "increasing"),
        ([-1, 4, 5, 6], [5, 7, 9], "increasing"),
        ([2, 4, 5, 6], [2, 5, 7], "t2d marks 3"),
        ([2, 4, 5, 6], [2, 5, 7, 10], "t2d marks 4"),
        ([2.0, 4.0, 5.0, 6.0], [2, 5, 7, 9], "integers"),
    ],
)
def test_a_wrong_vocabulary_map_is_refused(d2t, ids, message):
    with pytest.raises(BadInput, match=message):
        vocab_map.to_ids(np.array(d2t), np.isin(np.arange(12), ids), "x")


def test_a_full_head_may_only_have_the_identity_as_its_map(tmp_path):
    folder = publish(tmp_path / "drafter", "sglang", **FULL)
    identity = {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    assert "draft_ids" not in read(change(folder, tensors=lambda t: t.update(identity))).params
    with pytest.raises(BadInput, match="d2t and t2d say otherwise"):
        read(change(folder, tensors=lambda t: t["d2t"].put([3], 1)))


def test_norm_output_is_believed_only_where_it_has_one_meaning(tmp_path):
    flat = publish(tmp_path / "flat", "sglang", norm_output=True, fc_norm=True, **REDUCED)
    with pytest.raises(BadInput, match="give norm_output=false"):
        read(flat)
    for meant in (False, True):
        spec, params = read(flat, meant)
        assert spec.norm_output is meant
        agree(flat, spec, params, recurrence=meant)
    with pytest.raises(AssertionError, match="tolerance"):
        agree(flat, spec, params, recurrence=False)
    absent = publish(tmp_path / "absent", "sglang", **REDUCED)
    assert read(absent).spec.norm_output is False
    assert read(publish(tmp_path / "s", "speculators", norm_output=True, **REDUCED)).spec.norm_output is True
    assert read(change(flat, lambda c: c.update(_torchspec_version="0.1.0"))).spec.norm_output is True


def test_windows_are_read(tmp_path):
    for i, (layer, window) in enumerate(
        [
            ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, 9),
            ({"sliding_window": 9}, 9),
            ({"sliding_window": 9, "use_sliding_window": False}, 0),
            ({"sliding_window": 9, "layer_types": ["full_attention"]}, 0),
            ({**QWEN, "sliding_window": 9}, 0),
        ]
    ):
        folder = publish(tmp_path / str(i), "speculators", layer=layer, **FULL)
        assert read(folder).spec.window == window
    folder = publish(tmp_path / "x", "speculators", layer={"layer_types": ["sliding_attention"]}, **FULL)
    with pytest.raises(BadInput, match="sliding_window"):
        read(folder)


def test_the_embedding_must_be_the_target_s(tmp_path):
    folder = publish(tmp_path / "drafter", "speculators", **REDUCED)
    assert "embed" not in read(folder).params
    with pytest.raises(BadInput, match=r"embed_tokens\.weight; give the target's parameters"):
        read_drafter(folder, TARGET)
    change(folder, tensors=lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"] * 2}))
    with pytest.raises(BadInput, match=r"embed_tokens\.weight differs"):
        read(folder)


def test_the_mirrored_rope_must_agree(tmp_path):
    both = {"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}}
    spec, _ = read(publish(tmp_path / "same", "sglang", layer=both, **REDUCED))
    assert (spec.layer.rope.kind, spec.layer.rope.theta) == ("llama3", 500.0)
    for i, odd in enumerate(
        ({**both, "rope_theta": 400.0}, {**both, "rope_scaling": LLAMA3 | {"factor": 4.0}})
    ):
        with pytest.raises(BadInput, match="rope_parameters disagree"):
            read(publish(tmp_path / str(i), "sglang", layer=odd, **REDUCED))
