"""The cache contract: scattered paths move to the front, rejected nodes never enter, windows hide but keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import TINY, prompts, tiny_params

from eagle4.specs import ModelSpec, System
from eagle4.state import allocate
from eagle4.target import cache as kv
from eagle4.target import model as target
from eagle4.tree import topology

# root 0 with children 1 and 2; 3 and 4 hang from 1, 5 from 2: the path 0-2-5 is no prefix of the node order.
PARENTS = (-1, 0, 0, 1, 1, 2)
forward = jax.jit(target.apply, static_argnames="spec")
WINDOWS = {"full": (), "one layer": (3, 0)}


def rows_of(values):
    """One head, one channel: [B, N] as [B, 1, N, 1]."""
    return jnp.asarray(values, jnp.float32)[:, None, :, None]


def test_a_scattered_path_is_gathered_in_path_order():
    rows = rows_of([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]])
    path = jnp.array([[0, 2, 5, -1], [0, 1, -1, -1]])
    got = kv.gather_path(rows, path)[:, 0, :, 0]
    assert got.tolist() == [[10, 12, 15, 0], [20, 21, 0, 0]]


def test_absent_nodes_never_read_the_last_row():
    poisoned = rows_of([[1, 2, np.nan]])
    assert kv.gather_path(poisoned, jnp.array([[0, 1, -1]]))[0, 0, :, 0].tolist() == [1, 2, 0]


@pytest.mark.parametrize("batch", [1, 3])
def test_write_appends_each_row_at_its_own_length(batch):
    cache = kv.allocate(ModelSpec("llama", 4, 2, 2, 1, 1, 1, 2, 16), batch, 8)
    slots = jnp.broadcast_to(jnp.arange(1.0, 9.0), (batch, 8))
    length = jnp.array([3, 0, 5])[:batch]
    cache = kv.KVCache(k=(rows_of(slots),), v=(rows_of(-slots),), length=length)
    new, count = rows_of([[91, 92, 93]] * batch), jnp.array([2, 0, 3])[:batch]
    out = kv.write(cache, (new,), (2 * new,), count)
    assert out.length.tolist() == [5, 0, 8][:batch]
    expected = [[1, 2, 3, 91, 92], [], [1, 2, 3, 4, 5, 91, 92, 93]]
    for b in range(batch):
        assert out.k[0][b, 0, : out.length[b], 0].tolist() == expected[b]
        old = int(length[b])
        assert out.v[0][b, 0, :old, 0].tolist() == (-slots[b, :old]).tolist()
        assert out.v[0][b, 0, old : out.length[b], 0].tolist() == [2 * x for x in expected[b][old:]]


def test_rows_beyond_the_count_leave_no_trace():
    cache = kv.KVCache(
        k=(rows_of([[1, 2, 0, 0, 0]]),), v=(rows_of([[1, 2, 0, 0, 0]]),), length=jnp.array([2])
    )
    new = rows_of([[5, np.nan, np.nan]])
    out = kv.write(cache, (new,), (new,), jnp.array([1]))
    assert out.k[0][0, 0, :, 0].tolist() == [1, 2, 5, 0, 0]


def test_visible_slots_of_a_tree_in_a_window_of_three():
    """Five committed tokens, the root at position 5; siblings share a position and do not see each other."""
    parent = jnp.array([PARENTS])
    at = topology.positions(jnp.array([5]), topology.depths(parent))
    cache = kv.allocate(TINY, 1, 8)
    cache = kv.KVCache(cache.k, cache.v, jnp.array([5]))
    new, cached = target.visible(at, topology.ancestors(parent), cache, 3)
    drawn = lambda mask: ["".join(".x"[int(x)] for x in row) for row in np.asarray(mask[0])]  # noqa: E731
    assert drawn(cached) == ["...xx...", "....x...", "....x...", "........", "........", "........"]
    assert drawn(new) == ["x.....", "xx....", "x.x...", "xx.x..", "xx..x.", "x.x..x"]
    new, cached = target.visible(at, topology.ancestors(parent), cache, 2)
    assert drawn(cached)[1:] == ["........"] * 5
    assert drawn(new) == ["x.....", "xx....", "x.x...", ".x.x..", ".x..x.", "..x..x"]


def linear(params, spec, ids, size=12):
    """Logits [T, V] and key and value rows [G, T, E] of a whole text: one causal pass, no cache.

    Padded to one shape, since a causal row can't see what comes after it.
    """
    tokens, causal = np.array([ids + [0] * (size - len(ids))]), np.tri(size, dtype=bool)[None]
    out = jax.tree.map(np.asarray, forward(params, spec, tokens, np.arange(size)[None], causal))
    rows = [[x[0, :, : len(ids)] for x in side] for side in (out.k, out.v)]
    return out.logits[0, : len(ids)], *rows


def after_text(params, spec, texts, capacity=16):
    """A cache that holds all but the last token of each text."""
    sides = np.zeros((2, spec.num_layers, len(texts), spec.num_kv_heads, capacity, spec.head_dim), np.float32)
    for b, text in enumerate(texts):
        _, *rows = linear(params, spec, text[:-1])
        sides[:, :, b, :, : len(text) - 1] = rows
    k, v = (tuple(map(jnp.array, side)) for side in sides)
    return kv.KVCache(k, v, jnp.array([len(text) - 1 for text in texts]))


def spec_with(windows) -> ModelSpec:
    return ModelSpec(**{**vars(TINY), "windows": WINDOWS[windows]})


def tree_pass(params, spec, texts, guesses):
    """The tree PARENTS under the last token of each text, on a cache of the rest."""
    cache = after_text(params, spec, texts)
    parent = jnp.array([PARENTS] * len(texts))
    tokens = jnp.array([[text[-1], *guess] for text, guess in zip(texts, guesses)])
    at = topology.positions(cache.length, topology.depths(parent))
    return cache, forward(params, spec, tokens, at, topology.ancestors(parent), cache)


GUESSES = [[7, 9, 11, 13, 15], [8, 10, 12, 14, 16]]
NODE_PATHS = [[], [1], [2], [1, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("windows", WINDOWS)
def test_every_node_equals_its_path_run_in_a_line(windows):
    spec, texts = spec_with(windows), prompts((6, 3))
    params = tiny_params(TINY)
    _, out = tree_pass(params, spec, texts, GUESSES)
    for b, text in enumerate(texts):
        for node, path in enumerate(NODE_PATHS):
            alone, *_ = linear(params, spec, text + [GUESSES[b][n - 1] for n in path])
            np.testing.assert_allclose(np.asarray(out.logits)[b, node], alone[-1], atol=2e-4)


@pytest.mark.parametrize("windows", WINDOWS)
def test_the_round_after_a_scattered_commit_equals_plain_decoding(windows):
    """Row 0 accepts 0-2-5 and row 1 accepts 0-1: what follows is as if these texts had been decoded plainly."""
    spec, texts = spec_with(windows), prompts((6, 3))
    params = tiny_params(TINY)
    cache, out = tree_pass(params, spec, texts, GUESSES)
    path = jnp.array([[0, 2, 5], [0, 1, -1]])
    gathered = [tuple(kv.gather_path(x, path) for x in rows) for rows in (out.k, out.v)]
    cache = kv.write(cache, *gathered, jnp.array([3, 2]))
    texts = [texts[0] + [9, 15], texts[1] + [8]]
    assert cache.length.tolist() == [len(text) for text in texts]
    for b, text in enumerate(texts):
        _, k, v = linear(params, spec, text)
        for mine, other in zip(cache.k + cache.v, k + v):
            np.testing.assert_allclose(np.asarray(mine)[b, :, : len(text)], other, atol=2e-5)
    own = jnp.ones((2, 1, 1), bool)
    after = forward(params, spec, jnp.array([[21], [22]]), cache.length[:, None], own, cache)
    for b, text in enumerate(texts):
        alone, *_ = linear(params, spec, [*text, 21 + b])
        np.testing.assert_allclose(np.asarray(after.logits)[b, 0], alone[-1], atol=2e-4)


def test_a_window_changes_what_is_computed():
    """Otherwise the tests above would hold for a model that ignores its windows."""
    text = prompts((9,))[0]
    params = tiny_params(TINY)
    gap = np.abs(linear(params, spec_with("one layer"), text)[0] - linear(params, TINY, text)[0])
    assert gap[:3].max() < 1e-5
    assert gap[3:].max(axis=-1).min() > 1e-3


def test_padding_ids_of_a_prompt_are_not_kept():
    """Any padding id will do, also one outside the vocabulary, whose embedding would be NaN."""
    tokens = np.array([[5, 6, 7], [8, 10**6, -1]])
    state = allocate(System(TINY), tokens, np.array([3, 1]), np.array([0, 1]), 4, 64, jnp.float32)
    assert state.tokens[:, :4].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert jax.tree.leaves(state.cache)[0].shape[2] == 64
