"""Drafters of this project in the layouts that serving engines load, bfloat16.

SGLang skips a tensor whose name it does not know and then drafts with a random one, so every export is read back and
compared before it appears under its name. What an engine would not compute is refused.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save

from eagle4.checkpoint import Trained, named
from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.files import whole_folder, write_atomic
from eagle4.interop import vocab_map
from eagle4.interop.candidate_head import NAMES, CandidateHead
from eagle4.interop.describe import eagle4_config, reference_config, sglang_config, speculators_config
from eagle4.interop.layouts import EAGLE1, EAGLE4, EMBED, SGLANG, SPECULATORS, Layout, published_names
from eagle4.interop.read import read_published
from eagle4.nn.rope import inverse_frequencies
from eagle4.retrieval.factors import Factors
from eagle4.specs import EagleSpec, ModelSpec

Params = dict[str, Any]


def write_sglang(
    folder: Path | str,
    spec: EagleSpec,
    params: Params,
    target: ModelSpec,
    target_params: Mapping[str, Any] | None = None,
) -> None:
    """EAGLE-3 and EAGLE-3.1 for SGLang (and vLLM, unless `fc_bias`): `midlayer.*`, d2t offsets, output layer ids.

    A drafter that scores with the target's head takes it along, from `target_params`.
    """
    n = target.num_layers
    layer = _layer(spec, target)
    refuse(
        "SGLang",
        (spec.fusion != "taps", "EAGLE-1 drafters; write the reference layout instead (to=reference)"),
        (spec.norm_before_residual, "norm_before_residual"),
        (spec.norm_before_fc, "norm_before_fc"),
        (spec.window > 0, "a window"),
        (layer.qkv_bias, "biases of q, k and v (layer.qkv_bias)"),
        (layer.qk_norm, "norms of q and k (layer.qk_norm)"),
        _unturned(layer),
        (len(spec.taps) != 3, f"{len(spec.taps)} taps, only 3"),
        (not all(0 < tap < n for tap in spec.taps), f"taps outside 1..{n - 1}, as in {spec.taps}"),
    )
    drafter = _with_head(Trained(spec, params), target, target_params)
    config = sglang_config(drafter.spec, target)
    _write(Path(folder), config, _tensors(drafter, target, SGLANG), drafter, target, target_params)


def write_speculators(
    folder: Path | str,
    spec: EagleSpec,
    params: Params,
    target: ModelSpec,
    target_params: Mapping[str, Any],
    verifier: str = "",
) -> None:
    """EAGLE-3 and EAGLE-3.1 for vLLM: `layers.0.*`, the embedding, input layer ids. `verifier` names the target.

    A layer with norms of q and k is written as Qwen3's.
    """
    layer = _layer(spec, target)
    refuse(
        "speculators",
        (spec.fusion != "taps", "EAGLE-1 drafters; write the reference layout instead (to=reference)"),
        (spec.fc_bias, "a bias of fc (fc_bias)"),
        (layer.qkv_bias, "biases of q, k and v alone (layer.qkv_bias)"),
        _unturned(layer),
    )
    drafter = _with_head(Trained(spec, params), target, target_params)
    tensors = _tensors(drafter, target, SPECULATORS)
    tensors.setdefault(EMBED, _bfloat16(target_params["embed"]))
    config = speculators_config(drafter.spec, target, verifier)
    _write(Path(folder), config, tensors, drafter, target, target_params)


def write_reference(folder: Path | str, spec: EagleSpec, params: Params, target: ModelSpec) -> None:
    """EAGLE-1 as its authors publish it: `fc`, and `layers.0.*` without an input norm.

    Head and embedding are the target's and not written.
    """
    layer = _layer(spec, target)
    refuse(
        "the EAGLE-1 reference",
        (spec.fusion != "concat2", "EAGLE-3 drafters; write them with to=sglang or to=speculators"),
        (spec.draft_vocab > 0, "a head of the drafter's own"),
        (spec.window > 0, "a window"),
        (layer.qk_norm, "norms of q and k (layer.qk_norm)"),
        _unturned(layer),
    )
    drafter = Trained(spec, params)
    _write(
        Path(folder), reference_config(spec, target), _tensors(drafter, target, EAGLE1), drafter, target, None
    )


def write_eagle4(
    folder: Path | str,
    spec: EagleSpec,
    params: Params,
    target: ModelSpec,
    target_params: Mapping[str, Any],
    factors: Factors,
    candidates: int,
) -> None:
    """EAGLE-4 as it is published: `layers.0.*`, a head of the whole vocabulary, and the `factors` that find
    `candidates` ids for it. See `for_eagle4` for a drafter with another head."""
    drafter = for_eagle4(Trained(spec, params), target, target_params)
    V, D = drafter.params["head"].shape
    rank = factors.down.shape[0]
    if factors.down.shape != (rank, D) or factors.up.shape != (V, rank):
        raise BadInput(
            f"factors down {list(factors.down.shape)} and up {list(factors.up.shape)} do not fit a head {V} × {D}"
        )
    if not 1 <= candidates <= V:
        raise BadInput(f"retrieval.candidates={candidates} must lie in 1..{V}, the rows of the head")
    tensors = _tensors(drafter, target, EAGLE4)
    tensors |= {NAMES[field]: _finite(NAMES[field], value) for field, value in factors._asdict().items()}
    config = eagle4_config(drafter.spec, target, CandidateHead(rank, candidates))
    _write(Path(folder), config, tensors, drafter, target, target_params, factors)


def for_eagle4(drafter: Trained, target: ModelSpec, target_params: Mapping[str, Any]) -> Trained:
    """The drafter as EAGLE-4's layout can hold it: the target's head, or a list of its rows, becomes an own head of
    the whole vocabulary, which is what factors search. Raises BadInput for what the layout has no word for."""
    spec, layer, n = drafter.spec, _layer(drafter.spec, target), target.num_layers
    refuse(
        "EAGLE-4",
        (spec.fusion != "taps", "EAGLE-1 drafters; write the reference layout instead (to=reference)"),
        (spec.own_head and spec.draft_vocab < target.vocab_size, "a reduced head of the drafter's own"),
        (spec.norm_before_residual, "norm_before_residual"),
        (spec.norm_before_fc, "norm_before_fc"),
        (spec.fc_bias, "a bias of fc (fc_bias)"),
        (layer.qkv_bias, "biases of q, k and v (layer.qkv_bias)"),
        (layer.qk_norm, "norms of q and k (layer.qk_norm)"),
        (len(spec.taps) != 3, f"{len(spec.taps)} taps, only 3"),
        (not all(0 < tap < n for tap in spec.taps), f"taps outside 1..{n - 1}, as in {spec.taps}"),
    )
    if spec.target_rows:
        params = {name: value for name, value in drafter.params.items() if name != "draft_ids"}
        drafter = Trained(replace(spec, draft_vocab=0, target_rows=False), params)
    return _with_head(drafter, target, target_params)


def refuse(engine: str, *cases: tuple[bool, str]) -> None:
    """Raises BadInput for the first case that holds: the engine would drop it in silence."""
    for holds, what in cases:
        if holds:
            raise BadInput(f"{engine} does not know {what}; export elsewhere, or train without")


def _layer(spec: EagleSpec, target: ModelSpec) -> ModelSpec:
    if spec.layer is None:
        raise BadInput(
            "the drafter's spec is not complete (it has no layer); make it so with eagle_net.complete"
        )
    eagle_net.abstract(spec, target)  # refuses what can't work on this target
    return spec.layer


def _unturned(layer: ModelSpec) -> tuple[bool, str]:
    return layer.rope.kind == "none", "a layer without rope"


def _with_head(drafter: Trained, target: ModelSpec, target_params: Mapping[str, Any] | None) -> Trained:
    """The drafter with a head of its own: the target's, if it has been scoring with that one."""
    if drafter.spec.own_head:
        return drafter
    if target_params is None:
        raise BadInput(
            "this drafter scores with the target's head; give the target's parameters to export it too"
        )
    head = jnp.asarray(eagle_net.borrow(drafter.params, dict(target_params))["head"])
    spec = replace(drafter.spec, draft_vocab=head.shape[0], target_rows=False)
    return Trained(spec, {**drafter.params, "head": head})


def _tensors(drafter: Trained, target: ModelSpec, layout: Layout) -> dict[str, np.ndarray]:
    tree = eagle_net.abstract(drafter.spec, target)
    weights = {name: value for name, value in drafter.params.items() if name != "draft_ids"}
    wanted, have = named(tree), named(weights)
    odd = sorted(set(wanted) ^ set(have)) or [n for n in wanted if wanted[n].shape != np.shape(have[n])]
    reduced = 0 < drafter.spec.draft_vocab < target.vocab_size
    if odd or reduced != ("draft_ids" in drafter.params):
        what = odd[0] if odd else "draft_ids"
        raise BadInput(
            f"the drafter's parameters do not fit its spec: {what} is missing, misshapen or too much"
        )
    names = published_names(tree, layout)
    tensors = {names[name]: _finite(names[name], value) for name, value in have.items()}
    if reduced:
        tensors |= vocab_map.to_published(np.asarray(drafter.params["draft_ids"]), target.vocab_size)
    return tensors


def _finite(name: str, value: Any) -> np.ndarray:
    rounded = _bfloat16(value)
    if not np.all(np.isfinite(rounded.astype(np.float32))):
        raise BadInput(f"{name} is not finite in bfloat16; it was not written")
    return rounded


def _write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    drafter: Trained,
    target: ModelSpec,
    target_params: Mapping[str, Any] | None,
    factors: Factors | None = None,
) -> None:
    with whole_folder(folder) as temporary:
        write_atomic(temporary / "model.safetensors", save(dict(tensors), metadata={"format": "pt"}))
        write_atomic(temporary / "config.json", json.dumps(config, indent=2) + "\n")
        again = read_published(temporary, target, target_params=target_params)
        differing = differences(drafter, again.drafter)
        differing += _differing(_by_name(factors), _by_name(again.factors))
        if differing:
            raise RuntimeError(
                f"the export reads back differently: {', '.join(differing)}; it was not written"
            )


def differences(drafter: Trained, again: Trained) -> list[str]:
    """What an export changed, beyond rounding to bfloat16: names of spec fields and parameters."""
    ours, theirs = _flat_spec(drafter.spec), _flat_spec(again.spec)
    found = [name for name in ours if ours[name] != theirs[name]]
    return found + _differing(drafter.params, again.params)


def _differing(ours: Any, theirs: Any) -> list[str]:
    have, got = named(ours), named(theirs)
    differ = [n for n in have if n in got and not np.array_equal(_rounded(have[n]), _rounded(got[n]))]
    return sorted(set(have) ^ set(got)) + differ


def _by_name(factors: Factors | None) -> dict[str, Any]:
    return {} if factors is None else {"factors": factors._asdict()}


def _flat_spec(spec: EagleSpec) -> dict[str, Any]:
    """The fields that are computed with; a rope by its frequencies, since kinds ignore each other's fields."""
    assert spec.layer is not None
    frequencies, scale = inverse_frequencies(spec.layer.rope, spec.layer.head_dim)
    ignored = {"family": "", "tie_embeddings": False, "windows": (), "num_layers": 1, "vocab_size": 1}
    rest = {name: value for name, value in vars(spec).items() if name != "layer"}
    return {**rest, **vars(spec.layer), **ignored, "rope": (frequencies.tolist(), scale)}


def _rounded(value: Any) -> np.ndarray:
    return np.asarray(value) if np.asarray(value).dtype.kind == "i" else _bfloat16(value)


def _bfloat16(value: jax.Array | np.ndarray | Iterable[Any]) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(value).astype(ml_dtypes.bfloat16))
