"""EAGLE-4's published layout: read as its algebra says, written so that its loaders find everything, else refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_model
from interop_kit import (
    FINAL,
    HT,
    IDS,
    LAYER,
    LLAMA3,
    STATES,
    TARGET,
    TARGET_PARAMS,
    TOKENS,
    V,
    agree,
    change,
    drafted,
    draw,
    imported_logits,
    read,
    shapes,
    weights,
)
from interop_oracle import candidates, chain_states
from safetensors.numpy import load_file, save_file

from eagle4 import conf
from eagle4.checkpoint import Trained, load_drafter, load_factors, save_drafter, save_factors
from eagle4.drafters import eagle
from eagle4.drafters import eagle_net as net
from eagle4.errors import BadInput
from eagle4.interop import write
from eagle4.interop.candidate_head import NAMES
from eagle4.interop.read import read_published
from eagle4.nn.abstract import initialise
from eagle4.retrieval.factors import Factors, truncated
from eagle4.specs import EagleSpec, RetrievalSpec, RopeSpec, TreeSpec
from eagle4.target.load import load
from experiments import convert

RANK, COUNT, WINDOW = 3, 5, 2
UP, DOWN = "efficient_lm_head.weight", "efficient_lm_head_down_proj.weight"
HEAD = {"type": "low_rank", "rank": RANK, "num_candidates": COUNT}
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle4"],
    **{key: value for key, value in LAYER.items() if key != "rope_theta"},
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "draft_vocab_size": V,
    "target_hidden_size": HT,
    "fc_norm": True,
    "norm_output": True,
    "num_aux_hidden_states": 3,
    "layer_types": ["sliding_attention"],
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True},
    "efficient_lm_head_config": HEAD,
}
FULL_ATTENTION = {"layer_types": ["full_attention"], "sliding_window": None, "use_sliding_window": False}


def release(path: Path, at: str = "layers.0", rename=None, **changes) -> Path:
    """A made-up release: random tensors under published names; `changes` to its config, tensors renamed by `rename`."""
    config, rng = {**CONFIG, "_torchspec_version": "0.1.0", **changes}, np.random.default_rng(6)
    flags = {"draft_vocab_size": V, "fc_norm": config["fc_norm"]}
    sizes = shapes("sglang" if at == "midlayer" else "speculators", config, flags)
    if config["hidden_size"] == HT:
        sizes.pop("embed_tokens.weight", None)
    sizes |= {UP: (V, RANK), DOWN: (RANK, config["hidden_size"])}
    tensors = {name: draw(name, shape, rng) for name, shape in sizes.items()}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({(rename or str)(name): value for name, value in tensors.items()}, path / "model.safetensors")
    return path


def read_all(folder: Path):
    return read_published(folder, TARGET, target_params=TARGET_PARAMS)


CASES = {
    "as released": {},
    "no window": FULL_ATTENTION,
    "a window that shows everything": {"sliding_window": 99},
    "midlayer, prefixed": {"at": "midlayer", "rename": lambda name: f"model.{name}"},
    "the other fc": {"rename": lambda name: name.replace("fc.weight", "fc.linear.weight")},
    "wide": {"hidden_size": 16, "use_rope": True, "attn_norm": False, "enable_2hs": None},
    "no rope": {"use_rope": False},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 300.0}},
    "3's recurrence": {"norm_output": False, "fc_norm": False},
    "weighted factors": {
        "efficient_lm_head_config": {**HEAD, "type": "weighted_low_rank", "smooth_factor": 10},
    },
}


# --- reading ---


@pytest.mark.parametrize("case", CASES)
def test_a_release_computes_what_its_tensors_say(case, tmp_path):
    folder = release(tmp_path / "drafter", **CASES[case])
    (spec, params), factors, head = read_all(folder)
    said = CONFIG | CASES[case]
    assert (spec.fusion, spec.taps, spec.draft_vocab) == ("taps", (2, 5, 7), V)
    assert spec.window == (said["sliding_window"] or 0)
    assert (spec.fc_norm, spec.norm_output) == (said["fc_norm"], said["norm_output"])
    assert ("embed" in params, "draft_ids" in params) == (said["hidden_size"] != HT, False)
    assert head == (RANK, COUNT)
    assert factors is not None
    assert (factors.down.shape, factors.up.shape) == ((RANK, said["hidden_size"]), (V, RANK))
    agree(folder, spec, params)


def proposal(spec, params, factors, count=COUNT):
    """Candidates of the oracle's chain, by the drafter that decoding runs."""
    network = net.borrow(params, TARGET_PARAMS) | {"factors": factors}
    retrieval = RetrievalSpec(RANK, count)
    return map(np.asarray, eagle.candidates(spec, retrieval, TreeSpec(), network, drafted(spec, params)))


def test_candidates_come_from_the_factors_and_their_probabilities_from_the_head(tmp_path):
    folder = release(tmp_path / "drafter")
    (spec, params), factors, _ = read_all(folder)
    states = chain_states(folder, STATES, FINAL, TOKENS, np.asarray(TARGET_PARAMS["embed"]))
    wanted, q = candidates(folder, states, COUNT)
    best = np.argsort(-states @ load_file(folder / "model.safetensors")["lm_head.weight"].T.astype(float))
    assert any(set(a) != set(b) for a, b in zip(wanted, best[:, :COUNT])), "the factors must miss something"
    ids, probs = proposal(spec, params, factors)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(probs, q, atol=1e-5)
    for planted in (
        factors._replace(up=factors.up[::-1]),
        factors._replace(down=factors.down[:, ::-1]),
        factors._replace(up=params["head"] @ factors.down.T),
    ):
        assert not np.array_equal(next(iter(proposal(spec, params, planted))), wanted)
    ids, probs = proposal(spec, params, factors, V)
    logits = imported_logits(spec, params)
    full = np.exp(logits - logits.max(-1, keepdims=True))
    full /= full.sum(-1, keepdims=True)
    np.testing.assert_allclose(probs, np.take_along_axis(full, ids, -1), atol=1e-5)


def test_the_window_is_anchored_at_the_last_committed_row(tmp_path, monkeypatch):
    """Of four committed rows a window of 2 shows the last two, however deep a draft is."""
    folder = release(tmp_path / "drafter")
    spec, params = read(folder)
    logits = imported_logits(spec, params)
    agree(folder, spec, params)
    for row, seen in enumerate((False, False, True, True)):
        with monkeypatch.context() as patch:
            patch.setattr("interop_kit.STATES", STATES + 3 * (np.arange(4) == row)[None, :, None])
            moved = np.abs(imported_logits(spec, params) - logits).max(-1)
        assert (moved > 1e-4).all() if seen else (moved == 0).all()
    for wrong in (0, 1, 3):
        with pytest.raises(AssertionError, match="tolerance"):
            agree(folder, replace(spec, window=wrong), params)
    within = eagle.within

    def sliding(spec, see, at, slot):
        return within(spec, see, at + (at.shape[1] == 1), slot)

    monkeypatch.setattr(eagle, "within", sliding)
    with pytest.raises(AssertionError, match="tolerance"):
        agree(folder, spec, params)


def taps_one_off(spec, params):
    return replace(spec, taps=tuple(tap - 1 for tap in spec.taps)), params


def plain_recurrence(spec, params):
    return replace(spec, norm_output=False), params


def target_head(spec, params):
    return spec, params | {"head": TARGET_PARAMS["head"]}


def turned(spec, params):
    return replace(spec, layer=replace(spec.layer, rope=RopeSpec(theta=300.0))), params


@pytest.mark.parametrize("bug", [taps_one_off, plain_recurrence, target_head, turned])
def test_a_planted_bug_shows_in_the_logits(bug, tmp_path):
    folder = release(tmp_path / "drafter")
    with pytest.raises(AssertionError, match="tolerance"):
        agree(folder, *bug(*read(folder)))


def test_it_is_known_by_its_name_its_config_or_its_factors_alone(tmp_path):
    def without_factors(tensors):
        for name in (UP, DOWN):
            del tensors[name]

    folder = change(release(tmp_path / "a"), tensors=without_factors)
    drafter, factors, head = read_all(folder)
    assert (factors, head) == (None, (RANK, COUNT))
    assert drafter.spec.draft_vocab == V
    agree(folder, *drafter)
    change(folder, lambda c: c.pop("efficient_lm_head_config"))
    assert read_all(folder)[1:] == (None, None)
    change(folder, lambda c: c.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(BadInput, match="unknown key num_aux_hidden_states"):
        read_all(folder)
    for name, anonymous in (
        ("b", lambda c: c.pop("architectures")),
        ("c", lambda c: c.update(architectures=[])),
    ):
        assert read_all(change(release(tmp_path / name), anonymous)).factors is not None


def test_the_head_stays_the_drafters_own_even_if_it_equals_the_targets(tmp_path):
    head = np.asarray(TARGET_PARAMS["head"]).astype(ml_dtypes.bfloat16)
    folder = change(release(tmp_path / "drafter"), tensors=lambda t: t.update({"lm_head.weight": head}))
    spec, params = read(folder)
    assert spec.own_head
    np.testing.assert_array_equal(params["head"], TARGET_PARAMS["head"])


# --- strictness ---


NAMES_OF_ALL = [*shapes("speculators", LAYER, {"draft_vocab_size": V, "fc_norm": True}), UP, DOWN]


@pytest.mark.parametrize("name", [name for name in NAMES_OF_ALL if name != "embed_tokens.weight"])
def test_every_tensor_is_needed_under_its_name_and_shape(name, tmp_path):
    folder = release(tmp_path / "drafter")
    whole = load_file(folder / "model.safetensors")
    without = {key: value for key, value in whole.items() if key != name}
    renamed = without | {f"{name}_": whole[name]}
    wider = without | {name: np.concatenate([whole[name], whole[name][:1]])}
    for tensors in (without, renamed, wider):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(BadInput, match=rf"({name} has shape|lacks {name})") as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_a_tensor_too_much_is_refused_a_map_too(tmp_path):
    folder = release(tmp_path / "drafter")
    whole = load_file(folder / "model.safetensors")
    embed = np.asarray(TARGET_PARAMS["embed"]).astype(ml_dtypes.bfloat16)
    for name, value, message in (
        ("extra.weight", whole["norm.weight"], r"also has extra\.weight"),
        ("fc.linear.weight", whole["fc.weight"], r"also has fc\.linear\.weight"),
        ("efficient_lm_head.bias", whole["norm.weight"], r"also has efficient_lm_head\.bias"),
        ("layers.0.pre_attention_layernorm.weight", whole["norm.weight"], "pre_attention_layernorm"),
        ("eh_proj.weight", whole["fc.weight"], r"also has eh_proj\.weight"),
        ("d2t", np.zeros(V, np.int64), "also has d2t"),
        ("t2d", np.ones(V, bool), "also has t2d"),
        ("embed_tokens.weight", embed * 2, r"embed_tokens\.weight differs"),
        ("norm.weight", whole["norm.weight"] * np.nan, r"norm\.weight is not finite"),
        (UP, whole[UP] * np.nan, rf"{UP} is not finite"),
    ):
        save_file(whole | {name: value}, folder / "model.safetensors")
        with pytest.raises(BadInput, match=message):
            read(folder)
    save_file(whole | {"embed_tokens.weight": embed}, folder / "model.safetensors")
    assert "embed" not in read(folder).params


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_norm", True, "attn_norm = True is not supported"),
        ("enable_post_mlp_norm", True, "enable_post_mlp_norm = True is not supported"),
        ("enable_2hs", True, "enable_2hs = True is not supported"),
        ("enable_defa", True, "enable_defa = True is not supported"),
        ("enable_defa", "no", "enable_defa must be true or false"),
        ("num_local_experts", 8, "num_local_experts = 8 is not supported"),
        ("moe_intermediate_size", 64, "unknown key moe_intermediate_size"),
        ("mlp_type", "sparse_swiglu", "unknown key mlp_type"),
        ("partial_rotary_factor", 0.25, "partial_rotary_factor = 0.25 is not supported"),
        ("use_rope", "yes", "use_rope must be true or false"),
        ("model_type", "qwen3", "only llama is"),
        ("num_hidden_layers", 2, "num_hidden_layers is 2"),
        ("attention_bias", True, "attention_bias"),
        ("qkv_bias", True, "unknown key qkv_bias"),
        ("bias", True, "unknown key bias"),
        ("norm_before_fc", True, "unknown key norm_before_fc"),
        ("max_window_layers", 1, "unknown key max_window_layers"),
        ("fc_norm", False, r"also has fc_norm\.0"),
        ("draft_vocab_size", 9, "draft_vocab_size is 9; an EAGLE-4 head has a row for each"),
        ("vocab_size", 25, "vocab_size is 25"),
        ("target_hidden_size", 16, "target_hidden_size is 16"),
        ("tie_word_embeddings", True, "an EAGLE-4 head is no copy"),
        ("num_aux_hidden_states", 4, "num_aux_hidden_states is 4, but .* names 3 layers"),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 3], "only inside eagle_config"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, r"lie in 0\.\.8"),
        ("sliding_window", None, "sliding_window is missing"),
        ("sliding_window", 0, "sliding_window must be positive"),
        ("use_sliding_window", False, "use_sliding_window or sliding_window is off"),
        ("layer_types", ["linear_attention"], "layer_types must be"),
        ("efficient_lm_head_config", None, rf"efficient_lm_head_config is missing, but there is {UP}"),
        ("efficient_lm_head_config", 3, "efficient_lm_head_config must be an object"),
        ("efficient_lm_head_config", {**HEAD, "ranks": 3}, "unknown key 'ranks'"),
        ("efficient_lm_head_config", {**HEAD, "type": "full"}, "type = 'full' is not supported"),
        ("efficient_lm_head_config", {"type": "low_rank", "rank": RANK}, "num_candidates is missing"),
        ("efficient_lm_head_config", {**HEAD, "rank": 0}, r"rank must lie in 1\.\.12"),
        ("efficient_lm_head_config", {**HEAD, "rank": 13}, r"rank must lie in 1\.\.12"),
        ("efficient_lm_head_config", {**HEAD, "rank": RANK + 1}, rf"{UP} has shape \[24, 3\]"),
        (
            "efficient_lm_head_config",
            {**HEAD, "num_candidates": V + 1},
            r"num_candidates must lie in 1\.\.24",
        ),
    ],
)
def test_a_config_that_says_something_else_is_refused(key, value, message, tmp_path):
    folder = change(release(tmp_path / "drafter"), lambda c: c.update({key: value}))
    with pytest.raises(BadInput, match=message) as caught:
        read(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- writing ---

OWN = replace(TARGET, num_layers=1, head_dim=6, ffn_size=20, rope=RopeSpec(theta=500.0))
BASE = EagleSpec(taps=(2, 5, 7), layer=OWN, fc_norm=True, norm_output=True, draft_vocab=V, window=WINDOW)
SPECS = {
    "as released": BASE,
    "target's head": replace(BASE, draft_vocab=0),
    "target's rows": replace(BASE, draft_vocab=len(IDS), target_rows=True),
    "wide": replace(BASE, layer=replace(OWN, hidden_size=16)),
    "no rope": replace(BASE, layer=replace(OWN, rope=RopeSpec("none"))),
    "llama3": replace(
        BASE, layer=replace(OWN, rope=RopeSpec("llama3", 500.0, 8.0, original_max_position=16))
    ),
    "3's recurrence, no window": replace(BASE, fc_norm=False, norm_output=False, window=0),
}


def made_factors(spec: EagleSpec, rank: int = RANK) -> Factors:
    rng = np.random.default_rng(8)
    sizes = (rank, spec.layer.hidden_size), (V, rank)
    return Factors(*(jnp.asarray(rng.standard_normal(s), jnp.bfloat16).astype(jnp.float32) for s in sizes))


def export(folder: Path, spec: EagleSpec, **other) -> Path:
    given = {"params": None, "factors": None, "candidates": COUNT} | other
    params = weights(spec) if given["params"] is None else given["params"]
    factors = made_factors(spec) if given["factors"] is None else given["factors"]
    write.write_eagle4(folder, spec, params, TARGET, TARGET_PARAMS, factors, given["candidates"])
    return folder


@pytest.mark.parametrize("name", SPECS)
def test_an_export_is_the_same_network_with_the_same_factors(name, tmp_path):
    spec, params = SPECS[name], weights(SPECS[name])
    folder = export(tmp_path / "out", spec)
    (again, got), factors, head = read_all(folder)
    if not spec.own_head:
        spec = replace(spec, draft_vocab=V, target_rows=False)
        own = {key: value for key, value in params.items() if key != "draft_ids"}
        params = own | {"head": TARGET_PARAMS["head"]}
    assert again == spec
    assert head == (RANK, COUNT)
    jax.tree.map(np.testing.assert_array_equal, (got, factors), (params, made_factors(spec)))
    agree(folder, spec, params)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_has_the_releases_keys_and_tensors_and_no_others(tmp_path):
    folder = export(tmp_path / "out", BASE)
    rope = {"rope_theta": 500.0, "rope_type": "default"}
    assert json.loads((folder / "config.json").read_text()) == CONFIG | {"rope_parameters": rope}
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == set(NAMES_OF_ALL) - {"embed_tokens.weight"}
    assert {str(value.dtype) for value in tensors.values()} == {"bfloat16"}
    assert (tensors[UP].shape, tensors[DOWN].shape) == ((V, RANK), (RANK, HT))
    config = json.loads((export(tmp_path / "full", SPECS["no rope"]) / "config.json").read_text())
    assert config.keys() - CONFIG.keys() == {"use_rope"}
    config = json.loads((export(tmp_path / "b", replace(BASE, window=0)) / "config.json").read_text())
    assert {key: config[key] for key in FULL_ATTENTION} == FULL_ATTENTION


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EagleSpec("concat2", layer=OWN), "EAGLE-1 drafters"),
        (replace(BASE, draft_vocab=len(IDS)), "a reduced head of the drafter's own"),
        (replace(BASE, norm_before_residual=True), "norm_before_residual"),
        (replace(BASE, fc_norm=False, norm_before_fc=True), "norm_before_fc"),
        (replace(BASE, fc_bias=True), "fc_bias"),
        (replace(BASE, layer=replace(OWN, qkv_bias=True)), "qkv_bias"),
        (replace(BASE, layer=replace(OWN, qk_norm=True)), "qk_norm"),
        (replace(BASE, taps=(2, 5)), "2 taps, only 3"),
        (replace(BASE, taps=(0, 5, 7)), r"taps outside 1\.\.7"),
        (replace(BASE, layer=None), "not complete"),
    ],
)
def test_what_the_layout_has_no_word_for_is_refused(spec, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        export(tmp_path / "out", spec, params={}, factors=made_factors(BASE))
    assert list(tmp_path.iterdir()) == []


def test_factors_that_do_not_fit_are_refused_and_a_faulty_export_never_appears(tmp_path, monkeypatch):
    fit = made_factors(BASE)
    for odd, message in (
        ({"factors": fit._replace(down=fit.down[:, 1:])}, "do not fit a head 24 × 12"),
        ({"factors": fit._replace(up=fit.up[1:])}, "do not fit a head"),
        ({"factors": fit._replace(up=fit.up[:, 1:])}, "do not fit a head"),
        ({"factors": fit._replace(up=fit.up * np.nan)}, rf"{UP} is not finite"),
        ({"candidates": 0}, r"retrieval\.candidates=0 must lie in 1\.\.24"),
        ({"candidates": V + 1}, r"retrieval\.candidates=25 must lie"),
    ):
        with pytest.raises(BadInput, match=message):
            export(tmp_path / "out", BASE, **odd)
    whole = write._write
    for bug, message in (
        (lambda config, tensors: tensors.update({UP: tensors[UP][::-1].copy()}), r"factors\.up"),
        (lambda config, tensors: [tensors.pop(name) for name in (UP, DOWN)], r"factors\.down, factors\.up"),
        (lambda config, tensors: config.update(sliding_window=9), "window"),
        (lambda config, tensors: config.update(norm_output=False), "norm_output"),
    ):

        def faulty(folder, config, tensors, *rest, bug=bug):
            bug(config, tensors)
            whole(folder, config, tensors, *rest)

        monkeypatch.setattr(write, "_write", faulty)
        with pytest.raises(RuntimeError, match=message):
            export(tmp_path / "out", BASE)
    assert list(tmp_path.iterdir()) == []


# --- the app ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a target of four layers, a drafter of ours with the target's head, and its factors of rank 4."""
    monkeypatch.chdir(tmp_path)
    source = tiny_model.write_model(tmp_path / "model", num_hidden_layers=4)
    tensors = load_file(source / "model.safetensors")
    for i in range(1, 4):
        tensors |= {
            name.replace("layers.0", f"layers.{i}"): tensors[name]
            for name in list(tensors)
            if "layers.0" in name
        }
    save_file(tensors, source / "model.safetensors")
    model = load(source)
    spec = net.complete(EagleSpec(taps=(1, 2, 3), fc_norm=True, norm_output=True, window=7), model.spec)
    params = initialise(net.abstract(spec, model.spec), jax.random.key(0))
    save_drafter("ours", Trained(spec, params), model.spec, model.params, "a card")
    own = load_drafter("ours", model.spec, model.params).params
    save_factors("ours", truncated(np.asarray(model.params["head"]), 4), own)
    return model


def run(monkeypatch, *overrides: str) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", "target_model=model", *overrides])
    conf.run_app(convert.main, "convert")


def advice(printed: str) -> list[str]:
    """The overrides in what the app says to run next."""
    return [word for word in printed.split() if "=" in word and not word.startswith("head.")]


def test_a_drafter_goes_out_and_comes_back_with_its_factors(home, monkeypatch, capsys):
    run(
        monkeypatch,
        "source=ours",
        "to=eagle4_release",
        "output=out",
        "retrieval.rank=4",
        "retrieval.candidates=6",
    )
    said = json.loads(Path("out/config.json").read_text())["efficient_lm_head_config"]
    assert said == {"type": "low_rank", "rank": 4, "num_candidates": 6}
    run(monkeypatch, "source=out", "to=eagle4", "output=back")
    ours, back = (load_drafter(name, home.spec, home.params) for name in ("ours", "back"))
    assert back.spec == replace(ours.spec, draft_vocab=home.spec.vocab_size)
    head = home.params["head"].astype(jnp.bfloat16).astype(jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, back.params, ours.params | {"head": head})
    before = load_factors("ours", 4, ours.params, home.params["head"])
    after = load_factors("back", 4, back.params, back.params["head"])
    jax.tree.map(np.testing.assert_array_equal, after, before)
    printed = capsys.readouterr().out
    config = conf.compose("benchmark", ["method=eagle3_1", *advice(printed)])
    drafter = conf.build(config.drafter)
    assert (drafter.checkpoint, drafter.retrieval) == ("back", RetrievalSpec(4, 6))
    assert "rank 4" in Path("back/README.md").read_text()
    run(
        monkeypatch,
        "source=out",
        "to=eagle4_release",
        "output=again",
        "retrieval.rank=4",
        "retrieval.candidates=6",
    )
    for name in ("config.json", "model.safetensors"):
        assert Path("again", name).read_bytes() == Path("out", name).read_bytes()


def test_where_there_are_no_factors_it_says_how_to_make_some(home, monkeypatch, capsys):
    run(
        monkeypatch,
        "source=ours",
        "to=eagle4_release",
        "output=out",
        "retrieval.rank=4",
        "retrieval.candidates=6",
    )
    change(Path("out"), tensors=lambda t: [t.pop(name) for name in NAMES.values()])
    capsys.readouterr()
    run(monkeypatch, "source=out", "to=eagle4", "output=back")
    assert sorted(path.name for path in Path("back").iterdir()) == [
        "README.md",
        "drafter.safetensors",
        "spec.json",
    ]
    config = conf.compose("train_head", advice(capsys.readouterr().out))
    assert conf.build(config.drafter).checkpoint == "back"
    assert conf.build(config.retrieval) == RetrievalSpec(4, 6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source=ours", "to=eagle4"], "give to=eagle4_release"),
        (["source=ours", "to=eagle4_release"], "has no factors of rank 64 (it has ranks 4); train them"),
        (
            ["source=ours", "to=eagle4_release", "retrieval.rank=4", "retrieval.candidates=99999"],
            "must lie in 1..",
        ),
        (["source=ours", "to=eagle4_release", "retrieval.selection=blocked"], "retrieval.selection=blocked"),
        (["source=out", "to=eagle4_release"], "give retrieval.rank=4, which it has"),
        (["source=bare", "to=eagle4_release"], "make some with experiments.train_head"),
        (["source=out", "to=sglang"], "does not know a window"),
    ],
)
def test_the_app_says_in_one_line_what_is_wrong(overrides, message, home, monkeypatch, capsys):
    run(
        monkeypatch,
        "source=ours",
        "to=eagle4_release",
        "output=out",
        "retrieval.rank=4",
        "retrieval.candidates=6",
    )
    run(
        monkeypatch,
        "source=ours",
        "to=eagle4_release",
        "output=bare",
        "retrieval.rank=4",
        "retrieval.candidates=6",
    )
    change(Path("bare"), tensors=lambda t: [t.pop(name) for name in NAMES.values()])
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "output=x", *overrides)
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert message in printed
    assert not Path("x").exists()
