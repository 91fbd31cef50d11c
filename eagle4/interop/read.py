"""Published EAGLE-1, EAGLE-3, EAGLE-3.1 and EAGLE-4 drafters into our parameter tree, strict both ways."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle4.checkpoint import Trained, named
from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.interop import vocab_map
from eagle4.interop.candidate_head import NAMES, CandidateHead, candidate_head, factor_leaves
from eagle4.interop.config import eagle_spec
from eagle4.interop.layouts import (
    EMBED,
    MAP,
    TOP,
    Layout,
    open_published,
    published_names,
    recognise,
    with_plain_fc,
)
from eagle4.nn.abstract import Leaf
from eagle4.retrieval.factors import Factors
from eagle4.specs import EagleSpec, ModelSpec
from eagle4.target.load import DTYPES, Store, check_tensors, read_json


class Published(NamedTuple):
    """What a published checkpoint holds: a drafter, low-rank factors of its head (EAGLE-4, where they are stored), and
    what its config says of factors, stored or not."""

    drafter: Trained
    factors: Factors | None = None
    head: CandidateHead | None = None


def read_drafter(
    folder: Path | str,
    target: ModelSpec,
    norm_output: bool | None = None,
    target_params: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> Trained:
    """The drafter of `read_published`, without factors."""
    return read_published(folder, target, norm_output, target_params, dtype).drafter


def read_published(
    folder: Path | str,
    target: ModelSpec,
    norm_output: bool | None = None,
    target_params: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> Published:
    """A published drafter for this target: its complete spec and its own parameters (`eagle_net.abstract`).

    `norm_output` overrides the config's flag. It is needed where a config says true and no engine's name or version
    beside it tells what that means: SpecForge wrote true for the plain recurrence before 2026-09-15. An absent flag is
    false. An embedding in the checkpoint must be the target's, unless the widths differ; `target_params` (its `embed`)
    is needed to compare them, since dropping another one would change the drafter. Raises BadInput naming the tensor
    or key at fault.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise BadInput(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a checkpoint folder")
    config, store = read_json(folder / "config.json"), open_published(folder)
    layout, store = recognise(store.shapes, config, folder), with_plain_fc(store)
    head, factors = None, {}
    try:
        spec = eagle_spec(config, layout, target, TOP["head"] in store.shapes, norm_output)
        tree = eagle_net.abstract(spec, target)
        if layout.eagle4:
            width = tree["norm"].shape[0]
            head = candidate_head(config, width, target.vocab_size)
            factors = factor_leaves(head, set(store.shapes), width, target.vocab_size)
    except BadInput as error:
        raise BadInput(f"{folder}: {error}") from error
    names = published_names(tree, layout)
    wanted = {names[name]: leaf for name, leaf in named(tree).items()} | factors
    check_tensors(store, wanted | _beside(store, spec, target, layout, EMBED in wanted))
    if EMBED in store.shapes and "embed" not in tree:
        _compare_embedding(store, target_params)

    def parameter(name: str) -> jax.Array:
        return jnp.asarray(_weight(store, name).astype(DTYPES[dtype]))

    params = jax.tree.unflatten(jax.tree.structure(tree), [parameter(names[name]) for name in named(tree)])
    drafter = Trained(spec, params | _draft_ids(store, spec, target))
    read = Factors(**{field: parameter(name) for field, name in NAMES.items()}) if factors else None
    return Published(drafter, read, head)


def _beside(
    store: Store, spec: EagleSpec, target: ModelSpec, layout: Layout, own_embedding: bool
) -> dict[str, Leaf]:
    """What may stand beside the parameters: the target's embedding, and a map but for EAGLE-4, which has none."""
    beside = {}
    if EMBED in store.shapes and not own_embedding:
        beside[EMBED] = Leaf((target.vocab_size, target.hidden_size), (None, None))
    mapped = spec.draft_vocab and set(MAP) & set(store.shapes) and not layout.eagle4
    if _reduced(spec, target) or mapped:
        beside |= {"d2t": Leaf((spec.draft_vocab,), (None,)), "t2d": Leaf((target.vocab_size,), (None,))}
    return beside


def _reduced(spec: EagleSpec, target: ModelSpec) -> bool:
    return 0 < spec.draft_vocab < target.vocab_size


def _draft_ids(store: Store, spec: EagleSpec, target: ModelSpec) -> dict[str, jax.Array]:
    """The target ids of a reduced head's rows; a full head may come with a map only if it maps ids to themselves."""
    if _reduced(spec, target):
        return {
            "draft_ids": jnp.asarray(
                vocab_map.to_ids(store.read("d2t"), store.read("t2d"), str(store.origin))
            )
        }
    if "d2t" in store.shapes and (np.any(store.read("d2t")) or not np.all(store.read("t2d"))):
        raise BadInput(f"{store.origin}: the head has a row for every id, but d2t and t2d say otherwise")
    return {}


def _weight(store: Store, name: str) -> np.ndarray:
    value = store.read(name)
    if value.dtype != np.float32:
        raise BadInput(f"{store.origin}: {name} is {value.dtype}; a weight must be a floating-point number")
    if not np.all(np.isfinite(value)):
        raise BadInput(f"{store.origin}: {name} is not finite")
    return value


def _compare_embedding(store: Store, target_params: Mapping[str, Any] | None) -> None:
    """The checkpoint's embedding must be the target's, to the precision of bfloat16."""
    if target_params is None:
        raise BadInput(
            f"{store.origin} holds {EMBED}; give the target's parameters, so that it can be compared"
        )
    theirs = np.asarray(target_params["embed"]).astype(ml_dtypes.bfloat16)
    if not np.array_equal(_weight(store, EMBED).astype(ml_dtypes.bfloat16), theirs):
        raise BadInput(
            f"{store.origin}: {EMBED} differs from the target's; a drafter with one of its own is read only if its "
            "width differs too"
        )
