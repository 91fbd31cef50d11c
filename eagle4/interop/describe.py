"""The `config.json` of exported drafters, as SGLang, speculators, EAGLE-4 and the EAGLE-1 reference expect it."""

from dataclasses import replace
from typing import Any

from eagle4 import __version__
from eagle4.interop import candidate_head
from eagle4.interop.candidate_head import CandidateHead
from eagle4.interop.config import LAYER, OURS, TYPE
from eagle4.interop.layer_ids import KEY, to_output_ids
from eagle4.specs import EagleSpec, ModelSpec, RopeSpec
from eagle4.target.config import FAMILIES, FULL, SLIDING

# The release whose config skeleton is written.
SPECULATORS_VERSION = "0.9.0"
# Guesses a round that the skeleton proposes; an engine's own setting goes before it.
PROPOSED = 3


def sglang_config(spec: EagleSpec, target: ModelSpec) -> dict[str, Any]:
    """For SGLang's LlamaForCausalLMEagle3, which vLLM loads too; the layer ids are of outputs."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(spec, target),
        "draft_vocab_size": spec.draft_vocab,
        "target_hidden_size": target.hidden_size,
        "bias": spec.fc_bias,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "eagle_config": {KEY: to_output_ids(spec.taps), "use_aux_hidden_state": True},
        OURS: __version__,
    }


def speculators_config(spec: EagleSpec, target: ModelSpec, verifier: str) -> dict[str, Any]:
    """For speculators and through it vLLM; the layer ids are of inputs."""
    assert spec.layer is not None
    return {
        TYPE: "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": spec.draft_vocab,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "target_hidden_size": None if spec.layer.hidden_size == target.hidden_size else target.hidden_size,
        KEY: list(spec.taps),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        LAYER: {"architectures": [_architecture(spec.layer)], **layer_config(spec, target)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": PROPOSED}],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [FAMILIES[target.family].architecture],
            },
        },
        OURS: __version__,
    }


def reference_config(spec: EagleSpec, target: ModelSpec) -> dict[str, Any]:
    """For EAGLE-1's own loader, which takes a bias of fc for granted unless told otherwise."""
    assert spec.layer is not None
    return {
        "architectures": [FAMILIES["llama"].architecture],
        **layer_config(spec, target),
        "bias": spec.fc_bias,
        "qkv_bias": spec.layer.qkv_bias,
        OURS: __version__,
    }


def eagle4_config(spec: EagleSpec, target: ModelSpec, head: CandidateHead) -> dict[str, Any]:
    """For the loaders of EAGLE-4, which refuse a key that they do not know; the layer ids are of outputs."""
    assert spec.layer is not None
    unknown, switch = ("hidden_act", "torch_dtype", "rope_theta", "rope_scaling"), {}
    if spec.layer.rope.kind == "none":
        spec, switch = replace(spec, layer=replace(spec.layer, rope=RopeSpec())), {"use_rope": False}
    fields = {key: value for key, value in layer_config(spec, target).items() if key not in unknown}
    if not spec.window:
        fields |= {"sliding_window": None, "use_sliding_window": False, "layer_types": [FULL]}
    return {
        "architectures": [candidate_head.ARCHITECTURE],
        **fields,
        **switch,
        "draft_vocab_size": spec.draft_vocab,
        "target_hidden_size": target.hidden_size,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "num_aux_hidden_states": len(spec.taps),
        "eagle_config": {KEY: to_output_ids(spec.taps), "use_aux_hidden_state": True},
        candidate_head.KEY: {
            "type": candidate_head.KINDS[0],
            "rank": head.rank,
            "num_candidates": head.candidates,
        },
    }


def layer_config(spec: EagleSpec, target: ModelSpec) -> dict[str, Any]:
    """The layer's own fields, those of a one-layer Llama or Qwen3 model, with rope in the old and the new layout."""
    layer = spec.layer
    assert layer is not None
    fields = {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": layer.max_position,
        "rms_norm_eps": layer.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        **rope_config(layer.rope),
    }
    if spec.window:
        fields |= {"sliding_window": spec.window, "use_sliding_window": True, "layer_types": [SLIDING]}
    return fields


def rope_config(rope: RopeSpec) -> dict[str, Any]:
    """`rope_theta` with `rope_scaling`, and `rope_parameters` beside them."""
    fields: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        fields["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if rope.attention_factor is not None:
            fields["attention_factor"] = rope.attention_factor
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else fields,
        "rope_parameters": {**fields, "rope_theta": rope.theta},
    }


def _architecture(layer: ModelSpec) -> str:
    return FAMILIES["qwen3" if layer.qk_norm else "llama"].architecture
