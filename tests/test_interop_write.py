"""Exports hold exactly what their loaders look for, read back to the same network, and refuse what would be dropped."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from interop_kit import IDS, TARGET, TARGET_PARAMS, V, agree, imported_logits, publish, weights
from safetensors.numpy import load_file

from eagle4 import conf
from eagle4.checkpoint import Trained, load_drafter, save_drafter
from eagle4.drafters import eagle_net as net
from eagle4.errors import BadInput
from eagle4.files import whole_folder
from eagle4.interop import write
from eagle4.interop.read import read_drafter
from eagle4.nn.abstract import initialise
from eagle4.specs import EagleSpec, RopeSpec
from eagle4.target.load import load
from experiments import convert

LAYER = replace(TARGET, num_layers=1, head_dim=6, ffn_size=16)
WIDE = replace(LAYER, hidden_size=16)
LLAMA3 = replace(LAYER, rope=RopeSpec("llama3", 500.0, 8.0, original_max_position=16))
YARN = replace(LAYER, rope=RopeSpec("yarn", 500.0, 4.0, original_max_position=16, attention_factor=1.2))
QWEN3 = replace(LAYER, qk_norm=True)
TAPS = {"taps": (2, 5, 7), "layer": LAYER}
SGLANG = {
    "reduced": EagleSpec(**TAPS, draft_vocab=len(IDS)),
    "full": EagleSpec(**TAPS, draft_vocab=V),
    "target's head": EagleSpec(**TAPS),
    "3.1": EagleSpec(**TAPS, draft_vocab=len(IDS), fc_norm=True, norm_output=True),
    "bias": EagleSpec(**TAPS, draft_vocab=V, fc_bias=True, norm_output=True),
    "wide": EagleSpec(taps=(1, 4, 6), layer=WIDE, draft_vocab=len(IDS), fc_norm=True),
    "llama3": EagleSpec(taps=(1, 4, 6), layer=LLAMA3, draft_vocab=V),
}
SPECULATORS = {
    **{name: SGLANG[name] for name in SGLANG if name != "bias"},
    "before": EagleSpec(**TAPS, draft_vocab=len(IDS), norm_before_residual=True, norm_before_fc=True),
    "window": EagleSpec(**TAPS, window=9, norm_output=True),
    "qwen3": EagleSpec(taps=(0, 8), layer=QWEN3, draft_vocab=V, window=3),
    "yarn": EagleSpec(taps=(3, 1, 6), layer=YARN, draft_vocab=V),
}
PLAIN = replace(LAYER, hidden_size=TARGET.hidden_size)
REFERENCE = {
    "plain": EagleSpec("concat2", layer=PLAIN),
    "biases": EagleSpec("concat2", layer=replace(PLAIN, qkv_bias=True), fc_bias=True),
}
WRITERS = {
    "sglang": lambda folder, spec, params: write.write_sglang(folder, spec, params, TARGET, TARGET_PARAMS),
    "speculators": lambda folder, spec, params: write.write_speculators(
        folder, spec, params, TARGET, TARGET_PARAMS, "owner/model"
    ),
    "reference": lambda folder, spec, params: write.write_reference(folder, spec, params, TARGET),
}
CASES = [
    (layout, name)
    for layout, specs in (("sglang", SGLANG), ("speculators", SPECULATORS), ("reference", REFERENCE))
    for name in specs
]
SPECS = {"sglang": SGLANG, "speculators": SPECULATORS, "reference": REFERENCE}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_an_export_is_the_same_network(layout, name, tmp_path):
    spec = SPECS[layout][name]
    params = weights(spec)
    WRITERS[layout](tmp_path / "new" / "out", spec, params)
    again = read_drafter(tmp_path / "new" / "out", TARGET, target_params=TARGET_PARAMS)
    if spec.fusion == "taps" and not spec.draft_vocab:
        spec, params = replace(spec, draft_vocab=V), params | {"head": TARGET_PARAMS["head"]}
    layer = replace(spec.layer, family="qwen3" if spec.layer.qk_norm else "llama")
    assert again.spec == replace(spec, layer=layer)
    assert jax.tree.structure(again.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    np.testing.assert_array_equal(imported_logits(*again), imported_logits(spec, params))
    if name != "yarn":
        agree(tmp_path / "new" / "out", spec, params)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


def exported(tmp_path: Path, layout: str, name: str) -> tuple[dict, dict]:
    WRITERS[layout](tmp_path / "out", SPECS[layout][name], weights(SPECS[layout][name]))
    return json.loads((tmp_path / "out" / "config.json").read_text()), load_file(
        tmp_path / "out" / "model.safetensors"
    )


def test_sglang_finds_its_names_offsets_and_output_ids(tmp_path):
    config, tensors = exported(tmp_path, "sglang", "3.1")
    layer = {
        *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        *(f"midlayer.{p}.weight" for p in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    }
    top = {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        *(f"fc_norm.{i}.weight" for i in range(3)),
    }
    assert set(tensors) == layer | top
    assert {str(x.dtype) for name, x in tensors.items() if name not in ("d2t", "t2d")} == {"bfloat16"}
    assert (str(tensors["d2t"].dtype), str(tensors["t2d"].dtype)) == ("int64", "bool")
    assert tensors["d2t"].tolist() == [i - n for n, i in enumerate(IDS)]
    assert np.flatnonzero(tensors["t2d"]).tolist() == IDS
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(IDS),
        "vocab_size": V,
        "target_hidden_size": TARGET.hidden_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True},
        "fc_norm": True,
        "norm_output": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert {key: config[key] for key in wanted} == wanted


def test_speculators_finds_its_names_embedding_and_input_ids(tmp_path):
    config, tensors = exported(tmp_path, "speculators", "before")
    assert {"layers.0.hidden_norm.weight", "input_norm.weight", "embed_tokens.weight", "d2t"} < set(tensors)
    assert not any(name.startswith("midlayer") for name in tensors)
    np.testing.assert_array_equal(
        tensors["embed_tokens.weight"].astype(np.float32), np.asarray(TARGET_PARAMS["embed"])
    )
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert (config["norm_before_residual"], config["norm_before_fc"], config["norm_output"]) == (
        True,
        True,
        False,
    )
    assert config["transformer_layer_config"]["head_dim"] == 6
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "owner/model",
        "architectures": ["LlamaForCausalLM"],
    }


def test_a_full_head_has_no_map(tmp_path):
    config, tensors = exported(tmp_path, "sglang", "target's head")
    assert not {"d2t", "t2d"} & set(tensors)
    assert config["draft_vocab_size"] == config["vocab_size"] == V
    np.testing.assert_array_equal(tensors["lm_head.weight"].astype(np.float32), TARGET_PARAMS["head"])


@pytest.mark.parametrize(
    ("layout", "spec", "message"),
    [
        ("sglang", EagleSpec(**TAPS, norm_before_residual=True), "norm_before_residual"),
        ("sglang", EagleSpec(**TAPS, norm_before_fc=True), "norm_before_fc"),
        ("sglang", EagleSpec(**TAPS, window=8), "window"),
        ("sglang", EagleSpec(taps=(2, 5, 7), layer=QWEN3), "qk_norm"),
        ("sglang", EagleSpec(taps=(2, 5, 7), layer=replace(LAYER, qkv_bias=True)), "qkv_bias"),
        ("sglang", EagleSpec(taps=(2, 5), layer=LAYER), "2 taps"),
        ("sglang", EagleSpec(taps=(0, 5, 7), layer=LAYER), r"taps outside 1\.\.7"),
        ("sglang", EagleSpec(taps=(2, 5, 8), layer=LAYER), r"taps outside 1\.\.7"),
        ("sglang", REFERENCE["plain"], "to=reference"),
        ("speculators", REFERENCE["plain"], "to=reference"),
        ("speculators", EagleSpec(**TAPS, fc_bias=True), "fc_bias"),
        (
            "speculators",
            EagleSpec(taps=(2, 5, 7), layer=replace(LAYER, rope=RopeSpec("none"))),
            "without rope",
        ),
        ("speculators", EagleSpec(taps=(2, 5, 7), layer=WIDE), "16 wide can't use the head"),
        ("reference", EagleSpec("concat2", layer=WIDE), "16 wide can't use the head"),
        ("reference", SGLANG["full"], "to=sglang"),
        ("reference", EagleSpec("concat2", layer=PLAIN, window=4), "window"),
        ("reference", EagleSpec("concat2", layer=QWEN3), "qk_norm"),
        ("sglang", EagleSpec(taps=(2, 5, 7)), "not complete"),
    ],
)
def test_what_an_engine_would_drop_is_refused(layout, spec, message, tmp_path):
    params = weights(spec) if spec.layer and spec.layer is not WIDE else {}
    with pytest.raises(BadInput, match=message):
        WRITERS[layout](tmp_path / "out", spec, params)
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_do_not_fit_or_are_not_finite_are_refused(tmp_path):
    spec = SGLANG["reduced"]
    params = weights(spec)
    for odd, message in [
        ({name: x for name, x in params.items() if name != "norm"}, "norm is missing"),
        (params | {"fc_bias": params["norm"]}, "fc_bias is missing, misshapen or too much"),
        (params | {"norm": params["norm"][:3]}, "norm is missing, misshapen"),
        ({name: x for name, x in params.items() if name != "draft_ids"}, "draft_ids"),
        (params | {"draft_ids": params["draft_ids"][::-1]}, "increasing"),
        (params | {"norm": params["norm"] * np.nan}, r"norm\.weight is not finite"),
        (params | {"norm": params["norm"] + 3.4e38}, r"norm\.weight is not finite"),
    ]:
        with pytest.raises(BadInput, match=message):
            WRITERS["sglang"](tmp_path / "out", spec, odd)
    with pytest.raises(BadInput, match="give the target's parameters"):
        write.write_sglang(
            tmp_path / "out", SGLANG["target's head"], weights(SGLANG["target's head"]), TARGET
        )


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (lambda config, tensors: config.update(norm_output=False), "norm_output"),
        (lambda config, tensors: config["eagle_config"].pop("eagle_aux_hidden_state_layer_ids"), "taps"),
        (lambda config, tensors: config.update(rope_theta=1.0, rope_parameters=None), "rope"),
        (lambda config, tensors: config.update(rms_norm_eps=1e-6), "rms_norm_eps"),
        (lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, ::-1].copy()}), "fc"),
        (lambda config, tensors: tensors["d2t"].__setitem__(slice(None), 0), None),
        (lambda config, tensors: tensors.pop("midlayer.hidden_norm.weight"), None),
    ],
)
def test_a_faulty_export_never_appears(bug, message, tmp_path, monkeypatch):
    whole, spec = write._write, SGLANG["3.1"]

    def faulty(folder, config, tensors, *rest):
        bug(config, tensors)
        whole(folder, config, tensors, *rest)

    monkeypatch.setattr(write, "_write", faulty)
    with pytest.raises(RuntimeError if message else BadInput, match=message):
        WRITERS["sglang"](tmp_path / "out", spec, weights(spec))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    with whole_folder(tmp_path / "empty") as folder:
        (folder / "a").write_text("x")
        assert not list((tmp_path / "empty").iterdir())
    assert (tmp_path / "empty" / "a").read_text() == "x"
    with pytest.raises(BadInput, match="exists already"), whole_folder(tmp_path / "empty"):
        raise AssertionError("not reached")
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "b"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# --- the app ---


def run(monkeypatch, *overrides: str) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *overrides])
    conf.run_app(convert.main, "convert")


def test_a_drafter_goes_through_every_layout_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tiny_model.write_model(tmp_path / "model", num_hidden_layers=1)
    model = load(source)
    spec = net.complete(EagleSpec(taps=(1,), norm_output=True), model.spec)
    params = initialise(net.abstract(spec, model.spec), jax.random.key(0))
    save_drafter("ours", Trained(spec, params), model.spec, model.params, "a card")
    ours = load_drafter("ours", model.spec, model.params)
    where = f"target_model={source}"
    run(monkeypatch, where, "source=ours", "to=speculators", "output=theirs")
    run(monkeypatch, where, "source=theirs", "to=eagle4", "output=back")
    back = load_drafter("back", model.spec, model.params)
    assert back.spec.taps == (1,)
    assert back.spec.norm_output
    head = model.params["head"].astype(jnp.bfloat16).astype(jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, back.params, ours.params | {"head": head})
    verifier = json.loads(Path("theirs/config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(source)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output=x"], "source is missing"),
        (["source=drafter"], "output is missing"),
        (["source=drafter", "output=x", "to=gguf"], "to=gguf is not known"),
        (["source=drafter", "output=x", "norm_output=maybe"], "norm_output must be"),
        (["source=drafter", "output=x"], "target_hidden_size is 12"),
    ],
)
def test_the_app_says_in_one_line_what_is_wrong(overrides, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "drafter", "sglang", layer={"hidden_size": 16}, draft_vocab_size=len(IDS))
    source = tiny_model.write_model(tmp_path / "model")
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, f"target_model={source}", *overrides)
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert message in printed
    assert not (tmp_path / "x").exists()
