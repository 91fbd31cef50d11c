"""Nothing in a published drafter passes unread: every tensor, flag and key counts, or is refused by its name."""

import jax
import numpy as np
import pytest
from interop_kit import (
    CASES,
    HT,
    REDUCED,
    TARGET,
    change,
    checkpoint,
    imported_logits,
    override_of,
    publish,
    read,
    shapes,
    without_nulls,
)
from safetensors.numpy import load_file, save_file

from eagle4.errors import BadInput
from eagle4.interop.read import read_drafter

STRICT = ("eagle1 with q, k, v biases", "eagle3.1", "speculators, its defaults", "speculators, qwen3")
TENSORS = [(case, name) for case in STRICT for name in shapes(
    CASES[case][0], without_nulls(CASES[case][1].get("layer", {})), CASES[case][1]
)]  # fmt: skip


@pytest.mark.parametrize(("case", "name"), TENSORS)
def test_every_tensor_is_needed_under_its_name_and_shape(case, name, tmp_path):
    folder = checkpoint(tmp_path / "drafter", case)
    whole = load_file(folder / "model.safetensors")
    without = {key: value for key, value in whole.items() if key != name}
    renamed = without | {f"{name}_": whole[name]}
    wider = without | {name: np.concatenate([whole[name], whole[name][:1]])}
    optional = name == "embed_tokens.weight"  # the target's, where the widths agree
    for tensors in (renamed, wider, *([] if optional else [without])):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(BadInput) as caught:
            read(folder, override_of(case))
        said = str(caught.value)
        assert f"{name} has shape" in said or f"lacks {name}" in said or (optional and name in said)
        assert "\n" not in said


@pytest.mark.parametrize("case", STRICT)
def test_a_tensor_too_much_is_refused(case, tmp_path):
    folder = checkpoint(tmp_path / "drafter", case)
    with pytest.raises(BadInput, match=r"also has extra\.weight"):
        read(
            change(folder, tensors=lambda t: t.update({"extra.weight": np.ones(3, np.float32)})),
            override_of(case),
        )


SILENT = ("norm_output", "norm_before_residual")  # no tensor tells of these


@pytest.mark.parametrize(
    ("case", "flag"),
    [
        (case, flag)
        for case in ("eagle1", "eagle3", "eagle3.1", "speculators", "speculators, its defaults")
        for flag in ("fc_norm", "norm_before_fc", "bias", "qkv_bias", *SILENT)
    ],
)
def test_a_flipped_flag_changes_the_logits_or_is_refused(case, flag, tmp_path):
    folder = checkpoint(tmp_path / "drafter", case)
    before = imported_logits(*read(folder, override_of(case)))
    default = flag == "bias" and case == "eagle1"
    change(folder, lambda c: c.update({flag: not c.get(flag, default)}))
    if flag in SILENT and case != "eagle1" and not (case == "eagle3" and flag == "norm_output"):
        after = imported_logits(*read(folder, None if flag == "norm_output" else override_of(case)))
        finite = np.isfinite(before)
        assert np.abs(after[finite] - before[finite]).max() > 1e-3
    else:
        with pytest.raises(BadInput):
            read(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 16, "hidden_size"),
        ("target_hidden_size", 16, "target_hidden_size is 16"),
        ("vocab_size", 25, "vocab_size is 25"),
        ("draft_vocab_size", 8, "lm_head.weight"),
        ("draft_vocab_size", 99, "draft_vocab_size must lie in"),
        ("draft_vocab_size", 0, "draft_vocab_size must lie in"),
        ("num_hidden_layers", 2, "num_hidden_layers is 2"),
        ("num_key_value_heads", 4, "k_proj"),
        ("head_dim", 8, "k_proj.weight has shape"),
        ("intermediate_size", 8, "down_proj.weight has shape"),
        ("attention_bias", True, "attention_bias"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("hidden_act", "gelu", "hidden_act"),
        ("model_type", "gpt_oss", "gpt_oss"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("fc_norm", "yes", "fc_norm must be true or false"),
        ("rope_scaling", {"rope_type": "magic"}, "magic"),
        ("eagle_config", {"layers": [1]}, "unknown key 'layers'"),
        ("fc_nrom", True, "unknown key fc_nrom; did you mean 'fc_norm'"),
        ("logit_scale", 2.0, "unknown key logit_scale"),
    ],
)
def test_a_config_that_says_something_else_is_refused(key, value, message, tmp_path):
    folder = publish(tmp_path / "drafter", "sglang", **REDUCED)
    with pytest.raises(BadInput, match=message) as caught:
        read(change(folder, lambda c: c.update({key: value})))
    assert str(folder) in str(caught.value)


def test_unknown_keys_are_refused_inside_a_speculators_config_too(tmp_path):
    folder = publish(tmp_path / "drafter", "speculators", **REDUCED)
    change(folder, lambda c: c.update(initializer_range=0.02, auto_map={"": "x"}))
    read(change(folder, lambda c: c["transformer_layer_config"].update(top_k=50, use_cache=True)))
    with pytest.raises(BadInput, match=r"unknown key transformer_layer_config\.fc_norm"):
        read(change(folder, lambda c: c["transformer_layer_config"].update(fc_norm=True)))
    change(folder, lambda c: c["transformer_layer_config"].pop("fc_norm"))
    with pytest.raises(BadInput, match="unknown key bias"):
        read(change(folder, lambda c: c.update(bias=True)))
    change(folder, lambda c: c.pop("bias"))
    with pytest.raises(BadInput, match="'dflash' is not read yet"):
        read(change(folder, lambda c: c.update(speculators_model_type="dflash")))


@pytest.mark.parametrize(
    ("tensor", "method"),
    [
        ("candidate_selector.predecessor_codebook", "DFlash 2"),
        ("model.markov_head.markov_w1.weight", "DSpark"),
        ("hidden_norm.weight", "DFlash"),
        ("model.layers.0.eh_proj.weight", "MTP"),
        ("mtp.fc.weight", "MTP"),
    ],
)
def test_other_methods_are_named_and_not_read(tensor, method, tmp_path):
    folder = publish(tmp_path / "drafter", "sglang", **REDUCED)
    with pytest.raises(BadInput, match=f"a {method} drafter"):
        read(change(folder, tensors=lambda t: t.update({tensor: np.ones((2, 2), np.float32)})))


def test_files_that_are_not_read_say_what_to_do(tmp_path):
    folder = publish(tmp_path / "drafter", "eagle1")
    with pytest.raises(BadInput, match="known here"):
        read(change(folder, tensors=lambda t: [t.pop(key) for key in list(t) if key.startswith("layers")]))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="convert it to model"):
        read(folder)
    with pytest.raises(BadInput, match="not a checkpoint folder"):
        read(tmp_path / "nowhere")
    twice = publish(tmp_path / "twice", "eagle1")
    with pytest.raises(BadInput, match="twice"):
        read(change(twice, tensors=lambda t: t.update({"model.fc.weight": t["fc.weight"]})))
    whole = publish(tmp_path / "whole", "sglang", **REDUCED)
    for name, value in {
        "fc.weight": np.ones((HT, 3 * HT), np.int64),
        "norm.weight": np.full(HT, np.nan),
    }.items():
        with pytest.raises(BadInput, match=rf"{name} is "):
            read(change(whole, tensors=lambda t, name=name, value=value: t.update({name: value})))
        change(whole, tensors=lambda t: t.update({"fc.weight": np.ones((HT, 3 * HT), np.float32)}))
    with pytest.raises(BadInput, match="float64"):
        read_drafter(whole, TARGET, dtype="float64")


def test_rotary_buffers_are_no_parameters_and_weights_come_in_the_dtype_asked_for(tmp_path):
    folder = publish(tmp_path / "drafter", "sglang", **REDUCED)
    change(
        folder, tensors=lambda t: t.update({"midlayer.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)})
    )
    _, params = read_drafter(folder, TARGET, dtype="bfloat16")
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16", "int32"}
    assert {str(x.dtype) for x in jax.tree.leaves(read(folder).params)} == {"float32", "int32"}
