"""A published drafter's `config.json` into an `EagleSpec`: a key is understood, known to be harmless, or refused."""

import difflib
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from eagle4.errors import BadInput
from eagle4.interop import candidate_head, layer_ids
from eagle4.interop.layouts import Layout
from eagle4.specs import EagleSpec, ModelSpec, RopeSpec
from eagle4.target.config import FULL, ONLY, SLIDING, flag, integer, known_family, model_spec

TYPE, LAYER, OURS = "speculators_model_type", "transformer_layer_config", "eagle4_version"
# The layer's shape; what stands in ONLY is refused where it would change the maths.
SHAPE = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "original_max_position_embeddings", "attention_bias", *ONLY,
}  # fmt: skip
WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
SHARED = {
    "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "draft_vocab_size", "target_hidden_size",
    "tie_word_embeddings",
}  # fmt: skip
FLAT = SHARED | SHAPE | WINDOW | {"eagle_config", "bias", "qkv_bias", OURS, "_torchspec_version"}
SPECULATORS = SHARED | {
    TYPE, LAYER, OURS, *layer_ids.INPUT_KEYS, "speculators_version", "speculators_config", "auto_map",
    "embed_requires_grad", "enable_sp_ulysses", "model_type",
}  # fmt: skip
# Options of EAGLE-4's that the network here has not.
ABSENT = ("attn_norm", "enable_post_mlp_norm", "enable_2hs", "enable_defa")
# `target_config` is a copy of the target's own config.
EAGLE4 = SHAPE | {
    *ABSENT, "sliding_window", "use_sliding_window", "layer_types", "fc_norm", "norm_output", "draft_vocab_size",
    "target_hidden_size", "tie_word_embeddings", "eagle_config", "use_rope", "num_aux_hidden_states", "target_config",
    candidate_head.KEY, "_torchspec_version",
}  # fmt: skip
# What transformers writes into every config, and what concerns training or text.
HARMLESS = {
    "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "pretraining_tp",
    "attention_dropout", "embd_pdrop", "_name_or_path", "name_or_path", "_attn_implementation_autoset",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class",
    "return_dict", "output_hidden_states", "output_attentions", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "pruned_heads", "chunk_size_feed_forward", "is_decoder", "cross_attention_hidden_size", "add_cross_attention",
    "tie_encoder_decoder", "finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params", "prefix",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip


def eagle_spec(
    config: Mapping[str, Any], layout: Layout, target: ModelSpec, own_head: bool, norm_output: bool | None
) -> EagleSpec:
    """The complete spec of a config for this target; `own_head` says whether the checkpoint holds one.

    `norm_output` decides what the config's flag of that name leaves open, see `read.read_drafter`.
    """
    if layout.eagle4:
        return _eagle4_spec(config, target, norm_output)
    speculators = TYPE in config
    inner = _layer_config(config) if speculators else config
    _refuse_unknown(config, SPECULATORS if speculators else FLAT)
    if speculators:
        _refuse_unknown(inner, SHAPE | WINDOW | {"tie_word_embeddings"}, f"{LAYER}.")
    layer = _layer(inner, speculators)
    _match_target(config, layer, target)
    vocab = config.get("draft_vocab_size")
    spec = EagleSpec(
        fusion=layout.fusion,
        fc_bias=flag(config, "bias", layout.fusion == "concat2"),
        fc_norm=flag(config, "fc_norm", False),
        norm_before_fc=flag(config, "norm_before_fc", False),
        norm_before_residual=flag(config, "norm_before_residual", False),
        norm_output=_norm_output(config, speculators, norm_output),
        window=_window(inner, layer),
        draft_vocab=integer(config, "draft_vocab_size") if vocab is not None else own_head * layer.vocab_size,
        layer=replace(layer, windows=()),
    )
    _check(
        vocab is None or 0 < spec.draft_vocab <= target.vocab_size,
        f"draft_vocab_size must lie in 1..{target.vocab_size}, got {spec.draft_vocab}",
    )
    if layout.fusion == "taps":
        _check_untied(config, "EAGLE-3")
        return replace(spec, taps=layer_ids.taps_of(config, speculators, target.num_layers))
    _check(not config.get("eagle_config"), "eagle_config is for EAGLE-3, but the tensors are EAGLE-1's")
    _check(
        spec.draft_vocab in (0, target.vocab_size),
        "draft_vocab_size: an EAGLE-1 drafter has the target's head",
    )
    return replace(spec, draft_vocab=0)


def _eagle4_spec(config: Mapping[str, Any], target: ModelSpec, norm_output: bool | None) -> EagleSpec:
    """EAGLE-3.1's network with a head of the whole vocabulary; `norm_output` has one meaning here."""
    _refuse_unknown(config, EAGLE4)
    for key in ABSENT:
        _check(not flag(config, key, False), f"{key} = True is not supported; only False is")
    family = config.get("model_type", "llama")
    _check(family == "llama", f"model_type {family!r} is not supported for EAGLE-4; only llama is")
    layer = _layer(config, False)
    if not flag(config, "use_rope", True):
        layer = replace(layer, rope=RopeSpec("none"))
    _match_target(config, layer, target)
    rows = integer(config, "draft_vocab_size", target.vocab_size)
    _check(
        rows == target.vocab_size,
        f"draft_vocab_size is {rows}; an EAGLE-4 head has a row for each of the target's {target.vocab_size} ids",
    )
    _check_untied(config, "EAGLE-4")
    taps = layer_ids.taps_of(config, False, target.num_layers)
    count = integer(config, "num_aux_hidden_states", 3)
    _check(
        len(taps) == count, f"num_aux_hidden_states is {count}, but {layer_ids.KEY} names {len(taps)} layers"
    )
    return EagleSpec(
        taps=taps,
        fc_norm=flag(config, "fc_norm", False),
        norm_output=flag(config, "norm_output", False) if norm_output is None else norm_output,
        draft_vocab=rows,
        window=_window(config, layer),
        layer=layer,
    )


def _check_untied(config: Mapping[str, Any], method: str) -> None:
    _check(
        not flag(config, "tie_word_embeddings", False),
        f"tie_word_embeddings is true, but an {method} head is no copy of the embedding; set it to false",
    )


def _layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    kind, inner = config[TYPE], config.get(LAYER)
    _check(kind == "eagle3", f"{TYPE} {kind!r} is not read yet; only eagle3 is")
    _check(isinstance(inner, Mapping), f"{LAYER} is missing or no object")
    assert isinstance(inner, Mapping)
    return inner


def _refuse_unknown(config: Mapping[str, Any], known: Set[str], where: str = "") -> None:
    for key in config:
        if key in known or key in HARMLESS:
            continue
        close = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "remove it if it changes nothing"
        _check(key != layer_ids.KEY, f"{key} stands for output ids only inside eagle_config; move it there")
        raise BadInput(f"config.json: unknown key {where}{key}; {hint}")


def _layer(config: Mapping[str, Any], speculators: bool) -> ModelSpec:
    """The layer's shape. The layer of a speculators checkpoint is of its `model_type`, any other one is Llama's."""
    count = integer(config, "num_hidden_layers", 1)
    _check(count == 1, f"num_hidden_layers is {count}; only drafters of one layer are read")
    _check(not flag(config, "attention_bias", False), "attention_bias = True is not supported; only False is")
    family = known_family(str(config.get("model_type", "llama")), "config.json: model_type")
    keys = SHAPE if family == "llama" else SHAPE | WINDOW
    fields = {key: value for key, value in config.items() if key in keys}
    fields |= {"model_type": family, "num_hidden_layers": 1}
    older = fields.pop("rope_scaling", None) if fields.get("rope_parameters") else None
    layer = model_spec(fields)
    if fields.get("rope_parameters"):
        _check_rope(fields, older, layer)
    if not speculators:
        layer = replace(layer, qkv_bias=flag(config, "qkv_bias", False), qk_norm=False)
    return replace(layer, family="qwen3" if layer.qk_norm else "llama")


def _check_rope(fields: Mapping[str, Any], scaling: Any, layer: ModelSpec) -> None:
    """Exporters mirror `rope_parameters` (transformers 5) into the older fields; the two must say the same."""
    older = {key: value for key, value in fields.items() if key != "rope_parameters"}
    older |= {"rope_scaling": scaling, "rope_theta": older.get("rope_theta", layer.rope.theta)}
    mirrored = model_spec(older).rope
    same = mirrored == layer.rope if scaling else mirrored.theta == layer.rope.theta
    _check(same, "rope_parameters disagree with rope_theta and rope_scaling; keep one of them")


def _window(config: Mapping[str, Any], layer: ModelSpec) -> int:
    """The sliding window; Llama configs have no rule for one, so `layer_types` decides, or else the length alone."""
    if layer.windows:
        return layer.windows[0]
    if str(config.get("model_type", "llama")) != "llama":
        return 0
    on = flag(config, "use_sliding_window", config.get("sliding_window") is not None)
    types = config.get("layer_types") or [SLIDING if on else FULL]
    _check(types in ([FULL], [SLIDING]), f"layer_types must be [{FULL!r}] or [{SLIDING!r}], got {types!r}")
    if types == [FULL]:
        return 0
    _check(on, f"layer_types has {SLIDING}, but use_sliding_window or sliding_window is off")
    window = integer(config, "sliding_window")
    _check(window > 0, f"sliding_window must be positive, got {window}")
    return window


def _match_target(config: Mapping[str, Any], layer: ModelSpec, target: ModelSpec) -> None:
    width = config.get("target_hidden_size")
    width = layer.hidden_size if width is None else integer(config, "target_hidden_size")
    for name, said, has in (
        (
            "target_hidden_size" if config.get("target_hidden_size") else "hidden_size",
            width,
            target.hidden_size,
        ),
        ("vocab_size", layer.vocab_size, target.vocab_size),
    ):
        _check(said == has, f"{name} is {said}, the target's is {has}; is this drafter for another target?")


def _norm_output(config: Mapping[str, Any], speculators: bool, override: bool | None) -> bool:
    said = flag(config, "norm_output", False)
    if override is not None:
        return override
    _check(
        not said or speculators or OURS in config or "_torchspec_version" in config,
        "norm_output is true, which SpecForge wrote for a plain EAGLE-3 recurrence until 2026-09-15; give "
        "norm_output=false for such an export, norm_output=true if it is a real EAGLE-3.1 one",
    )
    return said


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(f"config.json: {message}")
