"""The published layouts of drafter checkpoints: recognised by their tensors' names, mapped to ours.

The `architectures` of a config say little: the reference calls an EAGLE-3 drafter LlamaForCausalLM.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle4.checkpoint import named
from eagle4.errors import BadInput
from eagle4.interop.candidate_head import is_eagle4
from eagle4.target.load import FLOAT_KINDS, LAYER_NAMES, Store, open_safetensors

TOP = {
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    "input_norm": "input_norm.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "embed": "embed_tokens.weight",
}
MAP = ("d2t", "t2d")
EMBED = TOP["embed"]
# Methods that are told apart by one of their tensors, before EAGLE is thought of.
OTHERS = (
    ("DFlash 2", r"candidate_selector\..*"),
    ("DSpark", r"markov_head\..*"),
    ("DFlash", r"hidden_norm\.weight"),
    ("MTP", r"(.*\.)?(eh_proj|enorm|hnorm)\.weight|mtp\..*|mtp_layers\..*"),
)
_BUFFERS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_KINDS = (*FLOAT_KINDS, "BOOL", "U8", "I32", "I64")


class Layout(NamedTuple):
    """A network and how its layer is called. `fusion` is that of `EagleSpec`.

    `eagle4`: the head has a row for every id, low-rank factors may stand beside it, and the config has EAGLE-4's keys.
    """

    fusion: str
    layer: str
    eagle4: bool = False


EAGLE1 = Layout("concat2", "layers.0")
SGLANG = Layout("taps", "midlayer")
SPECULATORS = Layout("taps", "layers.0")
EAGLE4 = Layout("taps", "layers.0", eagle4=True)


def recognise(names: Iterable[str], config: Mapping[str, Any], where: Path) -> Layout:
    """The layout of a checkpoint with these tensors. Raises BadInput for methods that are not read yet.

    Only EAGLE-4's is known by its config too: its factors may be missing.
    """
    names = set(names)
    if is_eagle4(names, config):
        midlayer = any(name.startswith("midlayer.") for name in names)
        return EAGLE4._replace(layer="midlayer" if midlayer else "layers.0")
    for method, pattern in OTHERS:
        found = sorted(name for name in names if re.fullmatch(pattern, name))
        if found:
            raise BadInput(f"{where} holds a {method} drafter ({found[0]}); these are not read yet")
    if any(name.startswith("midlayer.") for name in names):
        return SGLANG
    if names & {f"layers.0.{norm}.weight" for norm in ("hidden_norm", "input_layernorm")}:
        return SPECULATORS
    if any(name.startswith("layers.0.") for name in names):
        return EAGLE1
    raise BadInput(f"{where} holds no drafter that is known here: it has neither midlayer.* nor layers.0.*")


def published_names(tree: Any, layout: Layout) -> dict[str, str]:
    """Our dotted name → the published one, for all leaves of a parameter tree but `draft_ids`."""
    return {name: _published(name, layout) for name in named(tree) if name != "draft_ids"}


def _published(name: str, layout: Layout) -> str:
    group, _, rest = name.partition(".")
    if group == "fc_norm":
        return f"fc_norm.{rest}.weight"
    if group != "layer":
        return TOP[group]
    if rest == "hidden_norm":
        return f"{layout.layer}.hidden_norm.weight"
    return LAYER_NAMES[rest].replace("model.layers.{i}", layout.layer)


def with_plain_fc(store: Store) -> Store:
    """`fc.linear.weight`, as some call it in an EAGLE-4 checkpoint, under the name `fc.weight`."""
    other = "fc.linear.weight"
    if other not in store.shapes or TOP["fc"] in store.shapes:
        return store
    shapes = {TOP["fc"] if name == other else name: shape for name, shape in store.shapes.items()}
    return Store(store.origin, shapes, lambda name: store.read(other if name == TOP["fc"] else name))


def open_published(folder: Path) -> Store:
    """The tensors of a published drafter, without the `model.` that some exporters put before every name."""
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors*")):
        raise BadInput(
            f"{folder} has its weights in {pickles[0]}, which is not opened (a pickle can run code); convert it to "
            "model.safetensors with safetensors.torch.save_file first"
        )
    store = open_safetensors(folder, _KINDS)
    inner = {name.removeprefix("model."): name for name in store.shapes if not _BUFFERS.fullmatch(name)}
    kept = [name for name in store.shapes if not _BUFFERS.fullmatch(name)]
    if len(inner) < len(kept):
        twice = sorted(set(kept) - set(inner.values()))
        raise BadInput(f"{folder} holds {twice[0]} twice, with and without model. before it")
    shapes = {short: store.shapes[name] for short, name in inner.items()}
    return Store(folder, shapes, lambda name: store.read(inner[name]))
