"""Topology: hand-drawn trees, and a plain-Python walk over random ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.errors import BadInput
from eagle4.tree import topology

A15 = [-1, 0, 0, 1, 1, 2]


def as_parent(*rows: list[int]) -> jax.Array:
    return jnp.asarray(rows, jnp.int32)


def mask_of(*rows: str) -> np.ndarray:
    return np.array([[c in "1x" for c in row] for row in rows])


def walk(parents: list[int], node: int) -> list[int]:
    """Root-to-node path by following parents, the obvious way."""
    trail = [node]
    while parents[trail[-1]] >= 0:
        trail.append(parents[trail[-1]])
    return trail[::-1]


def random_parents(rng: np.random.Generator, size: int, count: int) -> list[int]:
    parents = [-1] + [int(rng.integers(0, n)) for n in range(1, count)]
    return parents + [-1] * (size - count)


def test_drawing_in_the_docstring_is_the_mask():
    doc = topology.ancestors.__doc__ or ""
    rows = re.findall(r"(\d)  ([x.]{5})$", doc, flags=re.MULTILINE)
    assert [int(n) for n, _ in rows] == [0, 1, 2, 3, 4]
    drawn = mask_of(*(row for _, row in rows))
    np.testing.assert_array_equal(topology.ancestors(as_parent([-1, 0, 0, 1, 1]))[0], drawn)


def test_six_node_tree_of_the_field():
    parent = as_parent(A15)
    mask = mask_of("100000", "110000", "101000", "110100", "110010", "101001")
    np.testing.assert_array_equal(topology.ancestors(parent)[0], mask)
    np.testing.assert_array_equal(topology.depths(parent)[0], [0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(topology.ranks(parent)[0], [-1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(topology.leaves(parent)[0], [0, 0, 0, 1, 1, 1])
    table = topology.children(parent, jnp.ones((1, 6), bool), 3)[0]
    np.testing.assert_array_equal(table[:3], [[1, 2, -1], [3, 4, -1], [5, -1, -1]])
    assert (np.asarray(table[3:]) == -1).all()
    expected = [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 1, 4], [0, 2, 5]]
    np.testing.assert_array_equal(topology.paths(parent, 2)[0], expected)


def test_rows_of_a_batch_are_their_own_trees():
    parent = as_parent(A15, [-1, 0, 1, 2, 3, 4], [-1, 0, 0, -1, -1, -1])
    position = topology.positions(jnp.asarray([7, 100, 0], jnp.int32), topology.depths(parent))
    expected = [[7, 8, 8, 9, 9, 9], [100, 101, 102, 103, 104, 105], [0, 1, 1, 0, 0, 0]]
    np.testing.assert_array_equal(position, expected)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 33])
def test_chain_is_the_causal_mask(size: int):
    parent = as_parent(list(range(-1, size - 1)))
    np.testing.assert_array_equal(topology.ancestors(parent)[0], np.tril(np.ones((size, size), bool)))


def test_unused_nodes_see_only_themselves_and_are_seen_by_nobody():
    parent = as_parent([-1, 0, 1, -1, -1])
    np.testing.assert_array_equal(
        topology.ancestors(parent)[0], mask_of("10000", "11000", "11100", "00010", "00001")
    )
    np.testing.assert_array_equal(topology.depths(parent)[0], [0, 1, 2, 0, 0])
    np.testing.assert_array_equal(topology.leaves(parent)[0], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(topology.paths(parent, 2)[0][3:], [[-1] * 3] * 2)
    np.testing.assert_array_equal(topology.leaves(as_parent([-1, -1]))[0], [1, 0])


def test_children_leave_out_nodes_that_may_not_be_accepted():
    candidate = jnp.asarray([[True, False, True, True, True, False]])
    table = topology.children(as_parent(A15), candidate, 2)[0]
    np.testing.assert_array_equal(table, [[2, -1], [3, 4], [-1, -1], [-1, -1], [-1, -1], [-1, -1]])


def test_paths_never_index_with_the_sentinel():
    parent = as_parent([-1, 0, 0, 2, 3])
    np.testing.assert_array_equal(topology.paths(parent, 3)[0][1], [0, 1, -1, -1])
    np.testing.assert_array_equal(topology.paths(parent, 2)[0][4], [-1, -1, -1])


def test_random_trees_equal_the_walk():
    rng = np.random.default_rng(0)
    size = 24
    rows = [random_parents(rng, size, count) for count in (1, 2, 9, 17, 24)]
    parent = as_parent(*rows)
    seen, depth = topology.ancestors(parent), topology.depths(parent)
    path, leaf = topology.paths(parent, size), topology.leaves(parent)
    table = topology.children(parent, jnp.ones(parent.shape, bool), size)
    for b, parents in enumerate(rows):
        count = 1 + sum(p >= 0 for p in parents)
        for n in range(count):
            trail = walk(parents, n)
            assert np.flatnonzero(seen[b, n]).tolist() == sorted(trail)
            assert depth[b, n] == len(trail) - 1
            assert path[b, n].tolist() == trail + [-1] * (size + 1 - len(trail))
            kids = [m for m in range(count) if parents[m] == n]
            assert table[b, n].tolist() == kids + [-1] * (size - len(kids))
            assert bool(leaf[b, n]) == (not kids)


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([], "root"),
        ([0, 0], "root"),
        ([-1, 0, 0, 1, 1, 2, 2], "7 nodes but the envelope holds 6"),
        ([-1, 0, -1], "node 2 has parent -1"),
        ([-1, 0, 9], "node 2 has parent 9"),
        ([-1, -2], "node 1 has parent -2"),
        ([-1, 2, 0], "node 1 comes before its parent 2"),
        ([-1, 1], "cycle through node 1"),
        ([-1, 0, 3, 4, 2], "cycle through node"),
    ],
)
def test_bad_parent_lists_are_refused_by_name(parents: list[int], words: str):
    with pytest.raises(BadInput, match=words) as error:
        topology.check_parents(parents, max_nodes=6)
    assert "\n" not in str(error.value)


def test_good_parent_lists_pass():
    topology.check_parents(A15, max_nodes=6)
    topology.check_parents([-1], max_nodes=1)
