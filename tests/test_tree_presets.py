"""Static shapes: the published tree, refused shapes, and the fitter against brute force."""

import math

import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.tree import presets, topology


def value(rates: np.ndarray, paths: tuple[tuple[int, ...], ...]) -> float:
    return sum(math.prod(rates[d][r] for d, r in enumerate(path)) for path in paths)


def all_trees(depth: int, children: int, guesses: int) -> set[frozenset[tuple[int, ...]]]:
    """Every set of rank paths without holes or missing prefixes, by adding one legal path at a time."""
    trees = {frozenset()}
    for _ in range(guesses):
        grown = set()
        for tree in trees:
            for above in [(), *tree]:
                rank = sum(len(p) == len(above) + 1 and p[:-1] == above for p in tree)
                if len(above) < depth and rank < children:
                    grown.add(tree | {(*above, rank)})
        trees = grown
    return trees


def test_published_tree():
    shape = presets.from_rank_paths(presets.EAGLE_25)
    assert len(shape.parent) == 26
    assert shape.nodes_at_depth() == (1, 4, 8, 8, 3, 2)
    assert (shape.max_depth, shape.max_children, shape.width) == (5, 4, 4)
    assert shape.expanded == ((0,), (1, 2, 3, 4), (5, 6, 7, 8), (13,), (21,))
    assert shape.num_children == ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,))
    topology.check_parents(shape.parent, max_nodes=26)


def test_nodes_are_ordered_by_level_then_rank_whatever_the_input_order():
    shape = presets.from_rank_paths([[1, 0], [0, 1], [1], [0, 0], [0]])
    assert shape.parent == (-1, 0, 0, 1, 1, 2)
    assert shape.rank == (-1, 0, 1, 0, 1, 0)
    assert shape.depth == (0, 1, 1, 2, 2, 2)
    assert shape == presets.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert hash(shape)


def test_root_alone_and_chains():
    assert presets.from_rank_paths([]).parent == (-1,)
    assert presets.chain(0) == (-1,)
    assert presets.chain(3) == (-1, 0, 1, 2)
    assert presets.from_rank_paths([(0,), (0, 0), (0, 0, 0)]).parent == presets.chain(3)


def test_spec_holds_the_tree_exactly():
    spec = presets.spec_of(presets.EAGLE_25)
    assert (spec.kind, spec.depth, spec.width, spec.children, spec.nodes) == ("static", 5, 4, 4, 26)
    root_only = presets.spec_of([])
    assert (root_only.depth, root_only.width, root_only.children, root_only.nodes) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([(0,), (1, 0)], r"\(1, 0\) needs its prefix \(1,\)"),
        ([(0,), (0, 1)], r"\(0, 1\) leaves a hole: \(0, 0\)"),
        ([(1,)], r"\(1,\) leaves a hole: \(0,\)"),
        ([(0,), (0,)], r"\(0,\) is listed 2 times"),
        ([(0,), (-1,)], r"\(-1,\) has a negative rank"),
        ([()], r"\(\) is the root"),
    ],
)
def test_bad_shapes_are_refused_by_path(paths: list[tuple[int, ...]], words: str):
    with pytest.raises(BadInput, match=words) as error:
        presets.from_rank_paths(paths)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_fitted_tree_beats_every_other_tree_of_its_size(seed: int):
    rates = -np.sort(-np.random.default_rng(seed).uniform(0, 1, (3, 3)), axis=1)
    for nodes in range(1, 7):
        paths = presets.fit_static(rates.tolist(), nodes)
        assert len(presets.from_rank_paths(paths).parent) == nodes
        best = max(value(rates, tuple(tree)) for tree in all_trees(3, 3, nodes - 1))
        assert value(rates, paths) == pytest.approx(best, abs=1e-12)


def test_fitted_shape_follows_the_rates():
    sure = presets.fit_static([[0.99, 0.01]] * 4, 5)
    assert presets.from_rank_paths(sure).parent == presets.chain(4)
    flat = presets.fit_static([[0.2, 0.2, 0.2, 0.2]] * 4, 5)
    assert flat == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("rates", "nodes", "words"),
    [
        ([[0.5, 0.6]], 2, "depth 1 rise with rank"),
        ([[0.5], [1.2]], 2, "depth 2 must lie in"),
        ([[0.5], [float("nan")]], 2, "depth 2 must lie in"),
        ([[0.5, 0.1], [0.5, 0.1]], 8, "at most 7 nodes, not 8"),
        ([[0.5]], 0, "nodes must be at least 1"),
    ],
)
def test_bad_rates_are_refused(rates: list[list[float]], nodes: int, words: str):
    with pytest.raises(BadInput, match=words):
        presets.fit_static(rates, nodes)
