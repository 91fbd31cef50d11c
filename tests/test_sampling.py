"""From logits to p, against oracles that sort and count; draws from given uniforms; penalties along a tree."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import chain_system, numpy_logits, plain_greedy, prompts, run, tiny_params, truth_table

from eagle4 import sampling
from eagle4.decode import Params
from eagle4.specs import ModelSpec, SamplingSpec
from eagle4.tree.topology import ancestors
from eagle4.types import DecodeState, KVCache

SPECS = [
    SamplingSpec(temperature=0.6),
    SamplingSpec(temperature=1.0, top_k=5),
    SamplingSpec(temperature=1.7, top_k=1000),
    SamplingSpec(temperature=1.0, top_p=0.9),
    SamplingSpec(temperature=0.7, top_p=0.35),
    SamplingSpec(temperature=1.0, min_p=0.1),
    SamplingSpec(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
]


def oracle(logits, spec) -> np.ndarray:
    """p by sorting, in float64, one row at a time."""
    rows = []
    for row in np.asarray(logits, np.float64).reshape(-1, np.shape(logits)[-1]):
        x = row / spec.temperature
        if spec.top_k:
            x = np.where(x >= np.sort(x)[::-1][min(spec.top_k, len(x)) - 1], x, -np.inf)
        p = np.exp(x - x.max())
        p /= p.sum()
        if spec.top_p < 1:
            falling = np.sort(p)[::-1]
            last = int(np.argmax(np.cumsum(falling) >= spec.top_p))
            p = np.where(p >= falling[last], p, 0)
            p /= p.sum()
        p = np.where(p >= spec.min_p * p.max(), p, 0)
        rows.append(p / p.sum())
    return np.reshape(rows, np.shape(logits))


def log(p) -> jax.Array:
    return jnp.log(jnp.array(p, jnp.float32))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_probabilities_equal_the_sorting_oracle(spec):
    rng = np.random.default_rng(1)
    smooth = rng.standard_normal((2, 6, 50)).astype(np.float32) * 2
    tied = rng.integers(0, 6, (2, 6, 50)).astype(np.float32)
    for logits in (smooth, tied):
        p = np.asarray(sampling.probabilities(jnp.array(logits), spec))
        expected = oracle(logits, spec)
        np.testing.assert_allclose(p, expected, atol=2e-6)
        np.testing.assert_array_equal(p > 0, expected > 0)
        np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)


def test_nucleus_of_a_large_peaked_vocabulary_equals_the_sorted_one():
    logits = np.random.default_rng(2).standard_normal((4, 5000)).astype(np.float32) * 4
    for top_p in (0.05, 0.5, 0.99, 0.9999):
        spec = SamplingSpec(temperature=1.0, top_p=top_p)
        p, expected = np.asarray(sampling.probabilities(jnp.array(logits), spec)), oracle(logits, spec)
        kept, wanted = (p > 0).sum(-1), (expected > 0).sum(-1)
        # Near mass 1 the float32 sum of 5000 terms is off by more than the last terms weigh.
        assert (np.abs(kept - wanted) <= (0 if top_p < 0.999 else 2)).all()
        np.testing.assert_allclose(p, expected, atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("top_p", [1e-8, 1e-3])
def test_a_tiny_nucleus_holds_the_likeliest_token_alone(top_p, dtype):
    logits = jnp.array([[0.1, 3.0, -2.0, 2.9, 0.0], [9.0, 9.5, -9.0, 0.0, 9.25]], dtype)
    p = sampling.probabilities(logits, SamplingSpec(temperature=1.0, top_p=top_p))
    assert p.tolist() == [[0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_top_k_one_is_greedy_and_everything_off_is_softmax():
    logits = jnp.array(np.random.default_rng(0).standard_normal((3, 4, 30)), jnp.float32)
    p = sampling.probabilities(logits, SamplingSpec(temperature=5.0, top_k=1))
    assert (p == jax.nn.one_hot(jnp.argmax(logits, -1), 30)).all()
    plain = sampling.probabilities(logits, SamplingSpec(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0))
    np.testing.assert_array_equal(plain, jax.nn.softmax(logits, -1))


def test_numbers_made_by_hand():
    def p(weights, **kw):
        return sampling.probabilities(log([weights]), SamplingSpec(kw.pop("temperature", 1.0), **kw))[
            0
        ].tolist()

    assert p([0.6, 0.3, 0.1], top_p=0.8) == pytest.approx([2 / 3, 1 / 3, 0])
    # Two tokens share the last place of the nucleus: both stay, in whichever order they stand.
    assert p([0.2, 0.5, 0.2, 0.1], top_p=0.6) == pytest.approx([2 / 9, 5 / 9, 2 / 9, 0])
    assert p([0.2, 0.5, 0.2, 0.1], top_k=2) == pytest.approx([2 / 9, 5 / 9, 2 / 9, 0])
    assert p([0.5, 0.3, 0.2], min_p=0.5) == pytest.approx([5 / 8, 3 / 8, 0])
    assert p([0.64, 0.32, 0.04], temperature=2.0) == pytest.approx([0.5109, 0.3613, 0.1277], abs=1e-4)


def test_filters_apply_in_order_temperature_top_k_top_p_min_p():
    def p(weights, **kw):
        return sampling.probabilities(log([weights]), SamplingSpec(kw.pop("temperature", 1.0), **kw))[
            0
        ].tolist()

    assert p([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5) == pytest.approx([1, 0, 0, 0])
    assert p([0.4, 0.24, 0.18, 0.18], top_p=0.6, min_p=0.5) == pytest.approx([0.625, 0.375, 0, 0])
    flat = [x / (0.5**0.5 + 0.3**0.5) for x in (0.5**0.5, 0.3**0.5)]
    assert p([0.5, 0.3, 0.2], temperature=2.0, top_p=0.5) == pytest.approx([*flat, 0])


def test_bfloat16_logits_are_cast_before_anything_else():
    logits = jnp.array(np.random.default_rng(4).standard_normal((2, 3, 400)) * 3, jnp.bfloat16)
    spec = SamplingSpec(temperature=0.9, top_k=200, top_p=0.97, min_p=1e-3)
    p = sampling.probabilities(logits, spec)
    assert p.dtype == jnp.float32
    np.testing.assert_allclose(p, oracle(logits.astype(jnp.float32), spec), atol=2e-6)


# --- draws ---


def test_draws_on_a_grid_of_uniforms_have_the_given_distribution():
    grid = (np.arange(4000) + 0.5) / 4000
    weights = np.array([0.0, 3.0, 0.5, 0.0, 1.25, 2.0, 0.0], np.float32)
    ids = sampling.draw(jnp.tile(weights, (4000, 1)), jnp.array(grid, jnp.float32))
    assert ids.dtype == jnp.int32
    counts = np.bincount(np.asarray(ids), minlength=7)
    np.testing.assert_allclose(counts / 4000, weights / weights.sum(), atol=1 / 4000)
    assert (np.diff(np.asarray(ids)) >= 0).all()


def test_draws_at_the_ends_and_from_nothing():
    below_one = np.nextafter(np.float32(1), np.float32(0))
    weights = jnp.array([[0.0, 0.25, 0.5, 0.0], [0, 0, 0, 0], [1.0, 1e-30, 0, 0], [0, 0, 0, 3e-38]])
    first = sampling.draw(weights, jnp.zeros(4))
    last = sampling.draw(weights, jnp.full(4, below_one))
    assert first.tolist() == [1, 0, 0, 3]
    half = sampling.draw(jnp.array([[0.25, 0.75, 0.0, 0.0]] * 4), jnp.array([0.0, 0.2499, 0.25, 0.9999]))
    assert half.tolist() == [0, 0, 1, 1]
    assert last.tolist()[:2] == [2, 0]
    assert last.tolist()[2] in (0, 1)
    assert last.tolist()[3] == 3


def test_the_lowest_index_wins_a_tie():
    scores = jnp.array([[1.0, 4.0, 4.0, 0.0], [-jnp.inf, -jnp.inf, -3.0, -3.0], [5.0, 5.0, 5.0, 5.0]])
    assert sampling.first_argmax(scores).tolist() == [1, 2, 0]
    deep = jnp.array(np.random.default_rng(0).integers(0, 3, (4, 5, 40)), jnp.float32)
    np.testing.assert_array_equal(sampling.first_argmax(deep), np.argmax(np.asarray(deep), -1))


def test_a_draw_belongs_to_request_and_position_alone():
    spec = SamplingSpec(temperature=1.0, seed=3)

    jitted = jax.jit(sampling.uniforms_at, static_argnums=(0, 3))

    def uniforms(seeds, starts, levels=3, spec=spec):
        return np.asarray(jitted(spec, jnp.array(seeds, jnp.int32), jnp.array(starts, jnp.int32), levels))

    three = uniforms([7, 8, 9], [5, 40, 5])
    assert three.shape == (3, 3, 2)
    assert ((three >= 0) & (three < 1)).all()
    assert len(np.unique(three)) == three.size
    np.testing.assert_array_equal(uniforms([9, 8, 7], [5, 40, 5]), three[::-1])
    np.testing.assert_array_equal(uniforms([7], [3], 5)[:, 2:], three[:1])
    assert (uniforms([7], [3], 5, SamplingSpec(temperature=1.0, seed=4))[:, 2:] != three[:1]).all()
    keys = sampling.request_keys(spec, jnp.array([7, 8, 7]), jnp.array([1, 1, 1]), sampling.VERIFY)
    data = jax.random.key_data(keys)
    assert (data[0] == data[2]).all()
    assert (data[0] != data[1]).any()


# --- penalties ---

SMALL = ModelSpec("llama", 32, 16, 16, 1, 2, 1, 8, 256)
penalise = jax.jit(sampling.penalise, static_argnames="spec")
PENALTIES = SamplingSpec(repetition_penalty=1.5, frequency_penalty=0.25)


def penalised(logits, spec, prompt, answer) -> np.ndarray:
    """One row of penalised logits, by counting."""
    out = np.array(logits, np.float64)
    for token in set(prompt) | set(answer):
        out[token] = (
            out[token] / spec.repetition_penalty if out[token] > 0 else out[token] * spec.repetition_penalty
        )
    for token in answer:
        out[token] -= spec.frequency_penalty
    return out


def test_penalties_count_each_nodes_prefix_and_ancestors():
    rng = np.random.default_rng(5)
    B, N, V, S = 3, 9, 7, 20
    parent = np.array([[-1, 0, 0, 1, 1, 2, 3, 6, -1], [-1, *range(8)], [-1, 0, -1, -1, -1, -1, -1, -1, -1]])
    tokens = rng.integers(0, V, (B, S))  # also beyond `length`: rubbish that must not count
    drafted = rng.integers(0, V, (B, N))
    start, length = np.array([4, 1, 6]), np.array([9, 2, 6])
    drafted[:, 0] = tokens[np.arange(B), length - 1]
    logits = rng.standard_normal((B, N, V)).astype(np.float32)
    integers = [jnp.array(x, jnp.int32) for x in (tokens, start, length, drafted)]
    attend = ancestors(jnp.array(parent, jnp.int32))
    mine = np.asarray(penalise(jnp.array(logits), PENALTIES, *integers, attend))
    for b in range(B):
        for n in range(N):
            path, node = [], n
            while node > 0 and parent[b, node] >= 0:
                path.append(int(drafted[b, node]))
                node = parent[b, node]
            if n and parent[b, n] < 0:
                continue  # unused
            prompt, answer = tokens[b, : start[b]].tolist(), tokens[b, start[b] : length[b]].tolist()
            expected = penalised(logits[b, n], PENALTIES, prompt, answer + path)
            np.testing.assert_allclose(mine[b, n], expected, atol=1e-6, err_msg=f"row {b}, node {n}")


def test_the_prompt_counts_for_repetition_but_not_for_frequency():
    ids = jnp.array([[0, 0, 1]])
    one = jnp.ones((1, 1), jnp.int32)
    logits = jnp.array([[[2.0, -2.0, 2.0, -2.0]]])
    arguments = (ids, jnp.array([2]), jnp.array([3]), one, jnp.ones((1, 1, 1), bool))
    both = penalise(logits, SamplingSpec(repetition_penalty=2.0, frequency_penalty=0.5), *arguments)
    assert both[0, 0].tolist() == [1.0, -4.5, 2.0, -2.0]


def penalised_greedy(prompt, new, spec) -> list[int]:
    answer: list[int] = []
    for _ in range(new):
        logits = numpy_logits(tiny_params(SMALL), SMALL, [*prompt, *answer])[-1]
        answer.append(int(np.argmax(penalised(logits, spec, prompt, answer))))
    return answer


def one_bucket(system):
    return replace(system, tree=replace(system.tree, buckets=(system.tree.nodes,)))


def test_penalised_greedy_decoding_equals_an_independent_decoder():
    texts, new, weights = prompts((6, 9), seed=8, vocab=32), 18, tiny_params(SMALL)
    spec = SamplingSpec(repetition_penalty=1.2, frequency_penalty=0.6)
    plain = [penalised_greedy(t, new + 5, spec) for t in texts]
    free = [plain_greedy(weights, SMALL, t, new) for t in texts]
    assert all(a != p[:new] for a, p in zip(free, plain)), "the penalties must matter"
    wanted = [p[:new] for p in plain]
    copied = one_bucket(chain_system("prompt_lookup", sampling=spec, model=SMALL))
    ids, _, info = run(copied, Params(weights), texts, new)
    assert ids == wanted
    assert (info.num_accepted < info.drafted_depth).any(), "some drafts must be rejected"
    drafter = {"truth": truth_table(texts, plain), "right": jnp.array([2, 0, 4, 1, 3]), "vocab": 32}
    chain = one_bucket(chain_system("scripted", sampling=spec, model=SMALL))
    ids, _, info = run(chain, Params(weights, drafter), texts, new)
    assert ids == wanted
    assert info.num_accepted[:3].tolist() == [[2, 2], [0, 0], [4, 4]]


def test_penalties_come_before_temperature():
    spec = SamplingSpec(temperature=2.0, frequency_penalty=1.0)
    rest = _state([0, 1, 1], prompt_length=1), jnp.array([[[1.0, 2.0, 0.5]]])
    node = jnp.array([[1]]), jnp.ones((1, 1, 1), bool)
    p = jax.jit(sampling.distribution, static_argnums=0)(spec, *rest, *node)
    np.testing.assert_allclose(p[0, 0], jax.nn.softmax(jnp.array([1.0, 0.0, 0.5]) / 2), rtol=1e-6)
    assert sampling.distribution(SamplingSpec(), *rest, *node) is rest[1]


def _state(text, prompt_length):
    one = jnp.array([prompt_length])
    size = jnp.array([len(text)])
    cache = KVCache((), (), size)
    return DecodeState(jnp.array([text]), size, one, size, one, one > 0, one, cache, (), ())
