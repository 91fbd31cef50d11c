"""Static trees: chains, published shapes, and the best shape for measured acceptance rates. Host code."""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle4.errors import BadInput
from eagle4.specs import TreeSpec

RankPath = tuple[int, ...]

# A digit is a rank among siblings: 021 is the second child of the third child of the first child of the root.
_EAGLE_25 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"

# The tree published with EAGLE (arXiv 2401.15077): 25 guesses, 26 nodes with the root.
EAGLE_25: tuple[RankPath, ...] = tuple(tuple(int(rank) for rank in path) for path in _EAGLE_25.split())


@dataclass(frozen=True)
class Static:
    """A tree whose shape is known before drafting: the root, then level by level, siblings by rank.

    `parent`, `rank` and `depth` have one entry per node (−1, −1, 0 for the root). `expanded[d]` lists the
    nodes at depth d that have children and `num_children[d]` how many each has: the child of rank r is its
    parent's r-th best. Ranks have no holes.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    depth: tuple[int, ...]
    expanded: tuple[tuple[int, ...], ...]
    num_children: tuple[tuple[int, ...], ...]

    @property
    def max_depth(self) -> int:
        return self.depth[-1]

    @property
    def max_children(self) -> int:
        return max((count for level in self.num_children for count in level), default=1)

    @property
    def width(self) -> int:
        """Most nodes that one draft step expands (the root is expanded before the first step)."""
        return max((len(level) for level in self.expanded[1:]), default=1)

    def nodes_at_depth(self) -> tuple[int, ...]:
        return tuple(self.depth.count(d) for d in range(self.max_depth + 1))


def chain(depth: int) -> tuple[int, ...]:
    """Parents of a root followed by `depth` tokens in a row."""
    return tuple(range(-1, depth))


def from_rank_paths(paths: Iterable[Sequence[int]]) -> Static:
    """The tree of rank paths, in any order: (0, 2) is the third child of the root's first child.

    Raises BadInput for an empty, negative or repeated path, a missing prefix, or a hole in a sibling order.
    """
    listed = [tuple(int(rank) for rank in path) for path in paths]
    known = set(listed)
    for path in listed:
        _check_path(path, listed.count(path), known)
    ordered = [(), *sorted(listed, key=lambda path: (len(path), path))]
    node = {path: n for n, path in enumerate(ordered)}
    parent = tuple(node[path[:-1]] if path else -1 for path in ordered)
    depth = tuple(len(path) for path in ordered)
    expanded = tuple(
        tuple(n for n in range(len(ordered)) if depth[n] == d and n in parent) for d in range(depth[-1])
    )
    return Static(
        parent=parent,
        rank=tuple(path[-1] if path else -1 for path in ordered),
        depth=depth,
        expanded=expanded,
        num_children=tuple(tuple(parent.count(n) for n in level) for level in expanded),
    )


def _check_path(path: RankPath, times: int, known: set[RankPath]) -> None:
    if not path:
        raise BadInput("tree path () is the root, which is always there; leave it out")
    if min(path) < 0:
        raise BadInput(f"tree path {path} has a negative rank; ranks count from 0")
    if times > 1:
        raise BadInput(f"tree path {path} is listed {times} times; list it once")
    above, rank = path[:-1], path[-1]
    if above and above not in known:
        raise BadInput(f"tree path {path} needs its prefix {above}, which is missing; add it")
    before = (*above, rank - 1)
    if rank > 0 and before not in known:
        raise BadInput(f"tree path {path} leaves a hole: {before} is missing; add it")


def spec_of(paths: Iterable[Sequence[int]], buckets: tuple[int, ...] = ()) -> TreeSpec:
    """The envelope that exactly holds the static tree of these rank paths."""
    listed = tuple(tuple(path) for path in paths)
    shape = from_rank_paths(listed)
    return TreeSpec(
        kind="static",
        depth=shape.max_depth,
        width=shape.width,
        children=shape.max_children,
        nodes=len(shape.parent),
        paths=listed,
        buckets=buckets,
    )


def fit_static(rates: Sequence[Sequence[float]], nodes: int) -> tuple[RankPath, ...]:
    """Rank paths of the `nodes`-node tree (root counted) with the largest expected number of accepted tokens.

    `rates[d][r]` is the probability that the child of rank r is accepted at depth d + 1, given that its
    parent was; a path is accepted with the product of its rates, and the expectation is the sum of these
    products. Best first is optimal: down a path and from one sibling to the next the product never rises,
    so the n largest always form a tree. Objective: Sequoia, arXiv 2402.12374 §3. Raises BadInput if rates
    are no probabilities or rise with rank, or if they describe fewer than `nodes` nodes.
    """
    _check_rates(rates)
    if nodes < 1:
        raise BadInput(f"tree nodes must be at least 1 (the root counts), got {nodes}")
    chosen: list[RankPath] = []
    heap: list[tuple[float, int, RankPath]] = []

    def offer(path: RankPath) -> None:
        depth, rank = len(path) - 1, path[-1]
        if depth < len(rates) and rank < len(rates[depth]):
            value = math.prod(rates[d][r] for d, r in enumerate(path))
            heapq.heappush(heap, (-value, len(path), path))

    offer((0,))
    while len(chosen) < nodes - 1:
        if not heap:
            raise BadInput(f"rates describe at most {len(chosen) + 1} nodes, not {nodes}; lower nodes")
        _, _, path = heapq.heappop(heap)
        chosen.append(path)
        offer((*path, 0))
        offer((*path[:-1], path[-1] + 1))
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def _check_rates(rates: Sequence[Sequence[float]]) -> None:
    for depth, level in enumerate(rates, start=1):
        if not all(0 <= rate <= 1 for rate in level):
            raise BadInput(f"acceptance rates at depth {depth} must lie in [0, 1], got {list(level)}")
        if any(later > earlier for earlier, later in itertools.pairwise(level)):
            raise BadInput(
                f"acceptance rates at depth {depth} rise with rank: {list(level)}; "
                "smooth them with numpy.minimum.accumulate"
            )
