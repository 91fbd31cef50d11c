"""Which of the target's features a drafter reads, between our index and the two published conventions.

Inside, a tap is a `hidden_states` index: 0 is the embedding, k the output of layer k − 1. Speculators stores the layer
whose *input* is read, which is the same number; `eagle_config` (SpecForge, SGLang) the layer whose *output* is read,
one less. Both are lists of small integers, so only the place where a list stands tells them apart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle4.errors import BadInput

KEY = "eagle_aux_hidden_state_layer_ids"
INPUT_KEYS = (KEY, "aux_hidden_state_layer_ids")
# What `eagle_config` may say besides the ids: settings of the one network that is read here.
FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def from_output_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Taps of layers whose outputs are read."""
    return tuple(i + 1 for i in ids)


def to_output_ids(taps: Sequence[int]) -> list[int]:
    """The layers whose outputs the taps are."""
    return [tap - 1 for tap in taps]


def published_default(num_layers: int) -> tuple[int, ...]:
    """The taps that all loaders take when a config names none: 2, n/2 and n − 3.

    Raises BadInput for a target so shallow that these are not three different layers.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise BadInput(f"config.json: {KEY} is missing, and a target of {num_layers} layers has no default")
    return taps


def taps_of(config: Mapping[str, Any], speculators: bool, num_layers: int) -> tuple[int, ...]:
    """The taps of a config: input ids in a speculators config, output ids in `eagle_config` of any other."""
    if speculators:
        lists = [config[key] for key in INPUT_KEYS if config.get(key)]
        if lists[1:] not in ([], lists[:1]):
            raise BadInput(f"config.json: {' and '.join(INPUT_KEYS)} disagree; keep one of them")
        taps = _ids(lists[0]) if lists else ()
    else:
        taps = from_output_ids(_ids(_eagle_config(config).get(KEY) or []))
    if not taps:
        return published_default(num_layers)
    if len(set(taps)) < len(taps) or not all(0 <= tap <= num_layers for tap in taps):
        raise BadInput(
            f"config.json: {KEY} reads hidden states {list(taps)}; they must differ and lie in 0..{num_layers}"
        )
    return taps


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise BadInput(f"config.json: eagle_config must be an object, got {inner!r}")
    for key, value in inner.items():
        if key != KEY and key not in FIXED:
            raise BadInput(f"config.json: eagle_config has the unknown key {key!r}")
        if key in FIXED and value is not FIXED[key]:
            raise BadInput(
                f"config.json: eagle_config.{key} = {value!r} is not supported; only {FIXED[key]} is"
            )
    return inner


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise BadInput(f"config.json: {KEY} must be a list of whole numbers, got {value!r}")
    return tuple(value)
