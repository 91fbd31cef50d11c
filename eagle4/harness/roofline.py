"""What rounds would cost on other hardware: cost tables from peak figures instead of timings.

A pass takes as long as its slower side, reading weights and cache or multiplying, and its kernels have to be started:

    seconds = max(bytes / bandwidth, flops / peak) + launch · (layers + 1)

Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009. Real
passes take longer; ratios between passes are what such a table is for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from eagle4.drafters import eagle_net
from eagle4.errors import BadInput, require
from eagle4.harness import costs
from eagle4.harness.costs import CostTable
from eagle4.harness.hardware import Limits, forward_limit_s
from eagle4.specs import EagleSpec, ModelSpec, RetrievalSpec
from eagle4.target import model

# Committed rows that a drafter is fed before its first draft step: what a round commits when three guesses are right.
FED = 4


@dataclass(frozen=True)
class HardwareSpec:
    """Peak figures of one of `devices` equal ones; work is split evenly and talking to each other costs nothing.

    `flops_per_s` is that of dense products in the dtype of `itemsize` bytes, which weights and cache have too.
    `launch_s`: seconds to start the kernels of one layer; the head counts as a layer. `source` names where the
    figures are from.
    """

    name: str
    flops_per_s: float
    read_bytes_per_s: float
    memory_bytes: float
    launch_s: float
    source: str
    itemsize: int = 2
    devices: int = 1

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "read_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"hardware.{name} must be positive, got {value}")
        require(0 <= self.launch_s < math.inf, f"hardware.launch_s must be at least 0, got {self.launch_s}")
        require(self.itemsize in (1, 2, 4), f"hardware.itemsize must be 1, 2 or 4 bytes, got {self.itemsize}")
        require(self.devices >= 1, f"hardware.devices must be at least 1, got {self.devices}")
        for name in ("name", "source"):
            require(bool(getattr(self, name).strip()), f"hardware.{name} must be given")

    @property
    def limits(self) -> Limits:
        """All devices together."""
        return Limits(self.devices * self.read_bytes_per_s, self.devices * self.flops_per_s)


def table(
    target: ModelSpec,
    drafter: EagleSpec | None,
    retrieval: RetrievalSpec | None,
    hardware: HardwareSpec,
    batch: Sequence[int],
    context: Sequence[int],
    nodes: Sequence[int],
    width: Sequence[int],
) -> CostTable:
    """The modelled costs over the given axes, in ms. `drafter` None drafts for free; else its spec is complete.

    Raises BadInput where weights and the largest cache don't fit into the devices' memory.
    """
    if drafter is None:
        require(retrieval is None, "a roofline with retrieval needs a drafter network; give its spec")
    _check_memory(target, drafter, retrieval, hardware, max(batch), max(context))

    def grid(size: Sequence[int], seconds) -> costs.Grid:
        ms = [[[1e3 * seconds(b, c, n) for n in size] for c in context] for b in batch]
        return costs.grid(batch, context, size, ms)

    def verify(b: int, c: int, n: int) -> float:
        return forward_s(target, hardware, b, c, n)

    if drafter is None:
        return CostTable(verify=grid(nodes, verify), first=costs.free(), step=costs.free())
    network = target, drafter, retrieval, hardware
    return CostTable(
        verify=grid(nodes, verify),
        first=grid([1], lambda b, c, _: draft_s(*network, b, c, FED, scored=1, fused=True)),
        step=grid(width, lambda b, c, n: draft_s(*network, b, c, n, scored=n, fused=False)),
    )


def forward_s(target: ModelSpec, hardware: HardwareSpec, batch: int, context: int, nodes: int) -> float:
    """Seconds of a forward pass of the target over `nodes` new rows of each of `batch` sequences."""
    limit = forward_limit_s(target, batch * nodes, hardware.limits, context, batch, hardware.itemsize)
    return limit + hardware.launch_s * (target.num_layers + 1)


def draft_s(
    target: ModelSpec,
    drafter: EagleSpec,
    retrieval: RetrievalSpec | None,
    hardware: HardwareSpec,
    batch: int,
    context: int,
    rows: int,
    scored: int,
    fused: bool,
) -> float:
    """Seconds of a pass of the drafter: its layer over `rows` rows of each sequence, its head over `scored` of them.

    bytes = itemsize · (W + batch · 2·G·E·s + head), flops = batch · rows · (2·M + 4·H·E·s) + head, with s the context
    that the drafter's window shows, and W the weights the pass reads, M those of matrices. fc is among them where the
    target's features are `fused`; EAGLE-1 (concat2) needs it in every step. Draft rows' own attention is neglected.
    """
    layer = drafter.layer
    assert layer is not None
    seen = min(context, drafter.window or context)
    shapes = _shapes(target, drafter, fused or drafter.fusion == "concat2")
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    head_items, head_flops = _head(target, drafter, retrieval, batch * scored)
    items = sum(map(math.prod, shapes)) + batch * 2 * layer.num_kv_heads * layer.head_dim * seen + head_items
    flops = batch * rows * (2 * matrices + 4 * layer.num_heads * layer.head_dim * seen) + head_flops
    limits = hardware.limits
    return (
        max(hardware.itemsize * items / limits.read_bytes_per_s, flops / limits.flops_per_s)
        + 2 * hardware.launch_s
    )


def _shapes(target: ModelSpec, drafter: EagleSpec, fused: bool) -> list[tuple[int, ...]]:
    """Shapes of the drafter's weights that a pass reads, without embedding and head."""
    tree = eagle_net.abstract(drafter, target)
    read = {"layer", "norm"} | ({"fc", "fc_bias", "fc_norm", "input_norm"} if fused else set())
    return [leaf.shape for leaf in jax.tree.leaves({name: tree[name] for name in tree if name in read})]


def _head(
    target: ModelSpec, drafter: EagleSpec, retrieval: RetrievalSpec | None, rows: int
) -> tuple[int, int]:
    """Numbers read and operations of scoring `rows` rows: the whole head, or factors and the candidates' own rows."""
    assert drafter.layer is not None
    D, V = drafter.layer.hidden_size, drafter.draft_vocab or target.vocab_size
    if retrieval is None:
        return V * D, rows * 2 * V * D
    R, C = retrieval.rank, retrieval.candidates
    return R * D + V * R + min(rows * C, V) * D, rows * 2 * (R * D + V * R + C * D)


def _check_memory(
    target: ModelSpec,
    drafter: EagleSpec | None,
    retrieval: RetrievalSpec | None,
    hardware: HardwareSpec,
    batch: int,
    context: int,
) -> None:
    items = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract(target)))
    cached = target.num_layers * target.num_kv_heads * target.head_dim
    if drafter is not None and drafter.layer is not None:
        layer, V = drafter.layer, drafter.draft_vocab or target.vocab_size
        items += sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(eagle_net.abstract(drafter, target)))
        items += retrieval.rank * (V + layer.hidden_size) if retrieval else 0
        cached += layer.num_kv_heads * layer.head_dim
    needed = hardware.itemsize * (items + batch * context * 2 * cached)
    there = hardware.devices * hardware.memory_bytes
    if needed > there:
        raise BadInput(
            f"batch {batch} at context {context} needs {needed / 1e9:.3g} GB, hardware {hardware.name} has "
            f"{there / 1e9:.3g}; lower batch or context, or raise hardware.devices"
        )
