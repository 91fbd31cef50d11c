"""Model specs from Hugging Face `config.json` fields.

The law: a spec computes what the class named in the config computes, or the config is refused by name. A
field that would change the maths and is not read here never passes in silence.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle4.errors import BadInput
from eagle4.specs import ModelSpec, RopeSpec


@dataclass(frozen=True)
class Family:
    """What a model family implies, and its class's defaults for absent fields (None = derived from sizes).

    `only` holds fields whose other values would change the maths, with the values that are understood.
    """

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    windows: bool
    max_position: int
    head_dim: int | None = None
    kv_heads: int | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


# attention_bias also puts a bias on the output projection; Qwen2 ignores it and always has q, k, v biases.
_NO_BIAS = {"attention_bias": (False, None)}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM", qkv_bias=False, qk_norm=False, windows=False, max_position=2048,
        only={**_NO_BIAS, "sliding_window": (None,)},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, windows=True, max_position=32768,
        kv_heads=32,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, windows=True, max_position=32768,
        kv_heads=32, head_dim=128, only=_NO_BIAS,
    ),
}  # fmt: skip

# The same for every family.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_scaling": (1, None),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "is_encoder_decoder": (False, None),
}

_COMMON_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"}
# Per rope kind: the fields it must have, and those it may have beside the common ones.
ROPE_FIELDS: Mapping[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": ({"factor"}, {"original_max_position_embeddings", *_YARN}),
}
FULL, SLIDING = "full_attention", "sliding_attention"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a `config.json` given as a dict.

    Reads Llama, Qwen2 and Qwen3 as their transformers classes do, class defaults included; sizes must be
    given. Raises BadInput naming the field that is missing, malformed, or asks for what is not computed here.
    """
    name = _family_name(config)
    family = FAMILIES[name]
    _refuse_foreign(config, name, family)
    layers = integer(config, "num_hidden_layers")
    heads = integer(config, "num_attention_heads")
    hidden = integer(config, "hidden_size")
    max_position = integer(config, "max_position_embeddings", family.max_position)
    kv_heads = config.get("num_key_value_heads", family.kv_heads)
    head_dim = config.get("head_dim", family.head_dim)
    derived = head_dim is None and heads > 0
    _check(
        not derived or hidden % heads == 0,
        f"hidden_size {hidden} is no multiple of {heads} heads; give head_dim",
    )
    return ModelSpec(
        family=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        ffn_size=integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads
        if kv_heads is None
        else integer({"num_key_value_heads": kv_heads}, "num_key_value_heads"),
        head_dim=hidden // heads if derived else integer({"head_dim": head_dim}, "head_dim"),
        max_position=max_position,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=rope_spec(config, max_position),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=flag(config, "tie_word_embeddings", False),
        windows=_windows(config, layers) if family.windows else (),
    )


def rope_spec(config: Mapping[str, Any], max_position: int) -> RopeSpec:
    """The rotary embedding of a config dict, from any layout in use.

    Layouts: `rope_theta` beside `rope_scaling` (transformers 4), `rope_parameters` (transformers 5), and
    either of them nested per attention type, accepted when all types agree. An absent
    `original_max_position_embeddings` is `max_position`. For yarn, `attention_factor` goes before `mscale`
    with `mscale_all_dim`, and those before the paper's 0.1·ln(factor) + 1 (arXiv 2309.00071 §3.4).
    """
    layouts = [_unnested(key, config) for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    _check(layouts[1:] in ([], layouts[:1]), "rope_parameters and rope_scaling disagree; keep one of them")
    rope = layouts[0] if layouts else {}
    kind = _rope_kind(rope)
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0))
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = _number(rope, "factor")
    inner = integer(rope, "original_max_position_embeddings", max_position)
    original = integer(config, "original_max_position_embeddings", inner)
    _check(original > 0, f"original_max_position_embeddings must be positive, got {original}")
    low, high = _number(rope, "low_freq_factor", 1.0), _number(rope, "high_freq_factor", 4.0)
    _check(0 < low < high, f"low_freq_factor {low} must be positive and below high_freq_factor {high}")
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
        beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=_attention_factor(rope, factor),
        truncate=flag(rope, "truncate", True),
    )


def known_family(name: str, where: str) -> str:
    """`name` if it is a known family, else BadInput naming the known ones; `where` names the field."""
    if name in FAMILIES:
        return name
    close = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.5)
    nearest = f"; did you mean {close[0]}?" if close else ""
    raise BadInput(f"{where} {name!r} is not supported; known families: {', '.join(FAMILIES)}{nearest}")


def _family_name(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    by_class = {family.architecture: name for name, family in FAMILIES.items()}
    model_type = config.get("model_type")
    if model_type is None:
        _check(len(architectures) == 1, "model_type is missing; is this a language model's config?")
        model_type = by_class.get(architectures[0], architectures[0])
    name = known_family(str(model_type), "config.json: model_type")
    wanted = FAMILIES[name].architecture
    _check(
        not architectures or wanted in architectures,
        f"architectures {architectures} is not supported; {name} needs {wanted}",
    )
    return name


def _refuse_foreign(config: Mapping[str, Any], name: str, family: Family) -> None:
    for key, accepted in {**ONLY, **family.only}.items():
        _check(
            key not in config or config[key] in accepted,
            f"{key} = {_short(config.get(key))} is not supported for {name}; only {accepted[0]!r} is",
        )
    custom = config.get("auto_map") or {}
    _check("AutoModelForCausalLM" not in custom, "auto_map names custom model code, which is not run here")


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """A window per layer, by `layer_types` or else from `max_window_layers` on; () when all are full."""
    on = flag(config, "use_sliding_window", False) and config.get("sliding_window", 4096) is not None
    window = integer(config, "sliding_window", 4096) if on else 0
    first = integer(config, "max_window_layers", 28)
    types = config.get("layer_types") or [SLIDING if on and i >= first else FULL for i in range(layers)]
    unknown = [kind for kind in types if kind not in (FULL, SLIDING)]
    _check(not unknown, f"layer_types has {_short(unknown[:1])}; known types: {FULL}, {SLIDING}")
    if SLIDING not in types:
        return ()
    _check(window > 0, f"layer_types has {SLIDING}, but use_sliding_window or sliding_window is off")
    return tuple(window if kind == SLIDING else 0 for kind in types)


def _unnested(key: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat rope object without its null fields, from a flat one or from one per attention type."""
    value = config[key]
    _check(isinstance(value, Mapping), f"{key} must be an object or null, got {_short(value)}")
    nested = [kind for kind in (FULL, SLIDING) if kind in value]
    ropes = [value]
    if nested:
        used = config.get("layer_types") or nested
        ropes = [value[kind] for kind in nested if kind in used]
        _check(len(nested) == len(value) and bool(ropes), f"{key} mixes attention types with other fields")
        _check(
            all(isinstance(rope, Mapping) and rope == ropes[0] for rope in ropes),
            f"{key} differs between attention types; only equal ones are supported",
        )
    return {name: item for name, item in ropes[0].items() if item is not None}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type", rope.get("type", "default"))
    _check(
        rope.get("type", kind) == kind, f"rope_type {kind!r} and type {rope.get('type')!r} disagree; keep one"
    )
    _check(kind in ROPE_FIELDS, f"rope type {kind!r} is not supported; use one of {', '.join(ROPE_FIELDS)}")
    partial = rope.get("partial_rotary_factor", 1)
    _check(partial == 1, f"partial_rotary_factor = {partial} is not supported; only 1 is")
    needed, optional = ROPE_FIELDS[kind]
    given = set(rope) - _COMMON_ROPE
    _check(needed <= given, f"{kind} rope lacks {', '.join(sorted(needed - given))}")
    foreign = sorted(given - needed - optional)
    _check(not foreign, f"{kind} rope does not read {', '.join(foreign)}; remove it or correct rope_type")
    return kind


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    if "attention_factor" in rope:
        return _number(rope, "attention_factor")
    mscale, all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    if not (mscale and all_dim):
        return None
    stretch = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (mscale * stretch + 1) / (all_dim * stretch + 1)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(f"config.json: {message}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of a config, or `default` where it is absent. Raises BadInput naming the field."""
    value = config.get(key, default)
    _check(value is not None, f"{key} is missing")
    _check(
        isinstance(value, int) and not isinstance(value, bool),
        f"{key} must be an integer, got {_short(value)}",
    )
    return int(value)  # type: ignore[arg-type]


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    _check(value is not None, f"{key} is missing")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _check(number, f"{key} must be a number, got {_short(value)}")
    return float(value)  # type: ignore[arg-type]


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false, or `default` where the field is absent or null. Raises BadInput naming the field."""
    value = default if config.get(key) is None else config[key]
    _check(isinstance(value, bool), f"{key} must be true or false, got {_short(value)}")
    return value
