"""config.json into ModelSpec: published configs, every rope layout, and all that must be refused by name."""

import dataclasses
import math

import pytest

from eagle4.errors import BadInput
from eagle4.specs import ModelSpec, RopeSpec
from eagle4.target.config import model_spec

LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN = {"rms_norm_eps": 1e-6, "rope": RopeSpec(theta=1e6), "tie_embeddings": True}
PUBLISHED = {
    "Llama-3.2-1B": (
        LLAMA32_1B,
        ModelSpec(
            "llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5,
            rope=RopeSpec("llama3", 5e5, 32.0, 1.0, 4.0, 8192), tie_embeddings=True,
        ),
    ),
    "Qwen2.5-0.5B": (
        QWEN25_05B, ModelSpec("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, **{**QWEN, "qkv_bias": True}),
    ),
    "Qwen3-0.6B": (
        QWEN3_06B, ModelSpec("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, **{**QWEN, "qk_norm": True}),
    ),
}  # fmt: skip
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config, wanted = PUBLISHED[name]
    assert model_spec(config) == wanted


def test_absent_fields_take_the_class_defaults():
    spec = model_spec(TINY)
    assert (spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps, spec.tie_embeddings) == (4, 8, 1e-6, False)
    assert spec.rope == RopeSpec(theta=10000.0)
    assert model_spec({**TINY, "num_key_value_heads": None, "head_dim": None}) == spec
    without_length = {k: v for k, v in TINY.items() if k != "max_position_embeddings"}
    assert model_spec(without_length).max_position == 2048
    assert (
        model_spec({**without_length, "model_type": "qwen2", "num_key_value_heads": 2}).max_position == 32768
    )
    assert model_spec({**TINY, "model_type": "qwen3", "num_key_value_heads": 2}).head_dim == 128
    by_class = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
    assert model_spec({**TINY, "model_type": None, **by_class}).family == "qwen2"


YARN = RopeSpec("yarn", 10000.0, 4.0, original_max_position=128)
YARN_FIELDS = {"factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = RopeSpec("linear", 5e4, 2.0, original_max_position=512)
LLAMA3 = RopeSpec("llama3", 5e4, 32.0, 1.0, 4.0, 8192)
ROPES = [
    ({"rope_theta": 5e4}, RopeSpec(theta=5e4)),
    ({"rope_theta": 5e4, "rope_scaling": None}, RopeSpec(theta=5e4)),
    ({"rope_theta": 5e4, "rope_scaling": {}}, RopeSpec(theta=5e4)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, RopeSpec(theta=5e4)),
    ({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2}}, LINEAR),
    ({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}, LINEAR),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}, LINEAR),
    (
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}},
        LINEAR,
    ),
    ({"rope_theta": 5e4, "rope_scaling": LLAMA3_ROPE}, LLAMA3),
    ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e4, "partial_rotary_factor": 1.0}}, LLAMA3),
    ({"rope_scaling": {"type": "yarn", **YARN_FIELDS, "finetuned": True}}, YARN),
    ({"rope_scaling": {"type": "yarn", **YARN_FIELDS, "attention_factor": None, "beta_fast": None}}, YARN),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, dataclasses.replace(YARN, original_max_position=512)),
    (
        {"original_max_position_embeddings": 256, "rope_scaling": {"type": "yarn", **YARN_FIELDS}},
        dataclasses.replace(YARN, original_max_position=256),
    ),
    (
        {
            "rope_scaling": {
                "type": "yarn",
                **YARN_FIELDS,
                "attention_factor": 0.5,
                "mscale": 1,
                "mscale_all_dim": 2,
            }
        },
        dataclasses.replace(YARN, attention_factor=0.5),
    ),
    (
        {"rope_scaling": {"type": "yarn", **YARN_FIELDS, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
        dataclasses.replace(YARN, beta_fast=16.0, beta_slow=2.0, truncate=False),
    ),
    ({"rope_scaling": {"type": "yarn", **YARN_FIELDS, "mscale": 0.7}}, YARN),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_theta": 5e4, "factor": 2.0, "rope_type": "linear"},
            }
        },
        LINEAR,
    ),
    (
        {
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e4},
                "sliding_attention": None,
            },
        },
        RopeSpec(theta=5e4),
    ),
]


@pytest.mark.parametrize(("fields", "wanted"), ROPES)
def test_rope_layouts(fields, wanted):
    assert model_spec({**TINY, **fields}).rope == wanted


def test_yarn_mscale_ratio():
    scaling = {"type": "yarn", **YARN_FIELDS, "mscale": 0.707, "mscale_all_dim": 1.0}
    got = model_spec({**TINY, "rope_scaling": scaling}).rope.attention_factor
    assert got == pytest.approx((0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1), rel=1e-12)


QWEN_TINY = {**TINY, "model_type": "qwen2", "num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"sliding_window": 8}, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (0, 0, 0, 8)),
        ({"use_sliding_window": True, "sliding_window": 8}, ()),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED}, (8, 0, 8, 0)),
        ({"layer_types": ["full_attention"] * 4}, ()),
    ],
)
def test_sliding_windows(fields, wanted):
    assert model_spec({**QWEN_TINY, **fields}).windows == wanted


def test_qwen2_ignores_attention_bias_as_its_class_does():
    assert model_spec({**QWEN_TINY, "attention_bias": False}).qkv_bias is True


def test_other_spelling_of_silu():
    assert model_spec({**TINY, "hidden_act": "swish"}) == model_spec(TINY)


REFUSED = [
    ({"model_type": "llama4"}, r"'llama4'.*llama, qwen2, qwen3; did you mean llama\?"),
    ({"model_type": "gpt_neox"}, "'gpt_neox'.*known families: llama, qwen2, qwen3"),
    ({"model_type": None}, "model_type is missing"),
    ({"model_type": None, "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"model_type": "qwen3", "num_key_value_heads": 2, "attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
    ({"sliding_window": 8}, "sliding_window = 8"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"hidden_size": "32"}, "hidden_size must be an integer"),
    ({"hidden_size": 33}, "hidden_size 33"),
    ({"num_key_value_heads": 3}, "num_kv_heads 3"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*default, linear, llama3, yarn"),
    ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}, "'longrope'"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "disagree"),
    ({"rope_scaling": {"type": "linear"}}, "linear rope lacks factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks high_freq_factor, low_freq_factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "does not read beta_fast"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
        "rope_parameters and rope_scaling disagree",
    ),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        "differs between attention types",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "rope_theta": 1e6}},
        "mixes attention types",
    ),
    ({**QWEN_TINY, "layer_types": MIXED}, "sliding_attention, but"),
    ({**QWEN_TINY, "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ({**QWEN_TINY, "layer_types": MIXED[:3], "use_sliding_window": True}, "3 entries for 4 layers"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_refused_by_name(fields, words):
    with pytest.raises(BadInput, match=words) as caught:
        model_spec({**TINY, **fields})
    assert "\n" not in str(caught.value)
