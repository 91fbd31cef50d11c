"""Laws 1, 3–7 of decoding with chains: greedy equality, cache commit, one trace, row independence, poison, edges."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import TINY, answers, begin, chain_system, plain_greedy, prompts, run, tiny_params, truth_table

from eagle4 import decode
from eagle4.decode import Params
from eagle4.errors import BadInput
from eagle4.policy_spec import PolicySpec
from eagle4.state import room

NEW = 20
TEXTS = prompts((5, 70, 3))


@pytest.fixture(scope="module")
def plain():
    return [plain_greedy(tiny_params(), TINY, t, NEW + 6) for t in TEXTS]


def script(plain, right, texts=TEXTS):
    drafter = {
        "truth": truth_table(texts, plain),
        "right": jnp.array(right, jnp.int32),
        "vocab": TINY.vocab_size,
    }
    return Params(tiny_params(), drafter)


@pytest.mark.parametrize("name", ["none", "prompt_lookup"])
def test_greedy_equals_the_independent_plain_decoder(name, plain):
    ids, _, _ = run(chain_system(name), Params(tiny_params()), TEXTS, NEW)
    assert ids == [p[:NEW] for p in plain]


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4])
def test_greedy_equality_at_every_forced_acceptance(right, plain):
    ids, _, info = run(chain_system("scripted"), script(plain, [right]), TEXTS, NEW)
    assert ids == [p[:NEW] for p in plain]
    assert (info.num_accepted[:-1] == right).all()


def test_ragged_acceptance_in_one_batch(plain):
    wrong_row = [plain[0], [(t + 1) % 48 for t in plain[1]], plain[2]]
    ids, _, info = run(chain_system("scripted"), script(wrong_row, [3]), TEXTS, NEW)
    assert ids == [p[:NEW] for p in plain]
    assert info.num_accepted[0].tolist()[0] == 3
    assert info.num_accepted[0].tolist()[1] < 3


def test_cache_and_drafter_equal_a_fresh_prefill(plain):
    system, params = chain_system("prompt_lookup"), Params(tiny_params())
    state = begin(system, params, TEXTS, NEW)
    for _ in range(4):
        state, _, _ = decode.generate(system, params, state, 1)
    texts = [t + a for t, a in zip(TEXTS, answers(state))]
    fresh = begin(system, params, [t[:-1] for t in texts], NEW)
    assert state.cache.length.tolist() == [len(t) - 1 for t in texts]
    for mine, other in zip(state.cache.k + state.cache.v, fresh.cache.k + fresh.cache.v):
        for b, text in enumerate(texts):
            slots = slice(0, len(text) - 1)
            np.testing.assert_allclose(mine[b, :, slots], other[b, :, slots], atol=2e-5)
    for b, text in enumerate(texts):
        assert state.drafter.length[b] == len(text)
        assert state.drafter.tokens[b, : len(text)].tolist() == text


def test_fifty_rounds_of_all_lengths_compile_once(plain):
    system = chain_system("scripted", depth=3)
    long = [plain_greedy(tiny_params(), TINY, TEXTS[0], 130)]
    params = script(long, [0, 1, 2, 3, 1, 0, 3, 2] * 7, TEXTS[:1])
    step = jax.jit(decode.one_round, static_argnames="system")
    state = begin(system, params, TEXTS[:1], 130)
    seen = set()
    for _ in range(50):
        state, info = step(system, params, state)
        seen.add(int(info.num_accepted[0]))
    assert seen == {0, 1, 2, 3}
    assert step._cache_size() == 1
    assert answers(state)[0] == long[0][: len(answers(state)[0])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_depend_on_their_neighbours(temperature):
    system, params = chain_system("prompt_lookup", temperature=temperature), Params(tiny_params())
    seeds = np.array([11, 12, 13])
    together, _, _ = run(system, params, TEXTS, NEW, seeds=seeds)
    swapped, _, _ = run(system, params, TEXTS[::-1], NEW, seeds=seeds[::-1])
    assert swapped[::-1] == together
    for i, text in enumerate(TEXTS):
        alone, _, _ = run(system, params, [text], NEW, seeds=seeds[i : i + 1])
        assert alone[0] == together[i]
    roomy, _, _ = run(system, params, TEXTS, NEW, seeds=seeds, capacity=256)
    assert roomy == together


def test_sampled_requests_differ_by_seed():
    system, params = chain_system("none", temperature=1.0), Params(tiny_params())
    ids, _, _ = run(system, params, [TEXTS[0]] * 2, NEW, seeds=np.array([1, 2]))
    assert ids[0] != ids[1]


def test_poison_beyond_the_committed_length_changes_nothing(plain):
    system, params = chain_system("prompt_lookup"), Params(tiny_params())
    state = begin(system, params, TEXTS, NEW)
    beyond = (jnp.arange(192) >= state.cache.length[:, None])[:, None, :, None]
    k = tuple(jnp.where(beyond, jnp.nan, x) for x in state.cache.k)
    v = tuple(jnp.where(beyond, 1e30, x) for x in state.cache.v)
    cache = replace(state.cache, k=k, v=v)
    tokens = jnp.where(jnp.arange(192) >= state.length[:, None], 7, state.tokens)
    state, _, _ = decode.generate(system, params, replace(state, cache=cache, tokens=tokens), NEW)
    assert answers(state) == [p[:NEW] for p in plain]


def test_poisoned_prompt_padding_changes_nothing(plain):
    system, params = chain_system("none"), Params(tiny_params())
    tokens = np.full((1, 64), 13, np.int32)
    tokens[0, :5] = TEXTS[0]
    state = decode.begin(system, params, PolicySpec(), tokens, np.array([5]), np.array([0]), NEW, 192)
    state, _, _ = decode.generate(system, params, state, NEW)
    assert answers(state)[0] == plain[0][:NEW]


@pytest.mark.parametrize("place", range(1, 12))
def test_stop_token_crops_at_every_place_inside_a_block(place, plain):
    stop = plain[0][place]
    if stop in plain[0][:place]:
        place = plain[0].index(stop)
    ids, state, info = run(
        chain_system("scripted"), script(plain, [4], TEXTS[:1]), TEXTS[:1], NEW, stop_ids=(stop, 999)
    )
    assert ids[0] == plain[0][: place + 1]
    assert bool(state.done[0])
    assert info.num_committed.sum() == place
    assert state.cache.length[0] == len(TEXTS[0]) + place


def test_a_stop_token_that_is_drafted_but_rejected_ends_nothing(plain):
    wrong = {(t + 1) % 48 for t in plain[0][1:]} - set(plain[0])
    assert wrong
    stops = (min(wrong), max(wrong))
    ids, _, _ = run(chain_system("scripted"), script(plain, [0], TEXTS[:1]), TEXTS[:1], NEW, stop_ids=stops)
    assert ids[0] == plain[0][:NEW]


@pytest.mark.parametrize("new", [1, 2, 4, 5, 6])
def test_new_token_budget_is_met_exactly(new, plain):
    ids, state, _ = run(chain_system("scripted"), script(plain, [4]), TEXTS, new, most=NEW)
    assert ids == [p[:new] for p in plain]
    assert bool(state.done.all())


def test_a_stop_token_beyond_the_budget_does_not_count(plain):
    script_ = script(plain, [4], TEXTS[:1])
    ids, _, _ = run(chain_system("scripted"), script_, TEXTS[:1], 3, most=NEW, stop_ids=(plain[0][4], 999))
    assert ids[0] == plain[0][:3]


def test_finished_rows_stay_as_they_are(plain):
    stop = plain[0][2]
    ids, _, info = run(chain_system("scripted"), script(plain, [1]), TEXTS, NEW, stop_ids=(stop,))
    for mine, full in zip(ids, plain):
        end = full.index(stop) + 1 if stop in full[:NEW] else NEW
        assert mine == full[:end]
    assert (info.num_committed[~info.active] == 0).all()


def test_phased_form_gives_identical_tokens(plain):
    system, params = chain_system("prompt_lookup"), Params(tiny_params())
    state = begin(system, params, TEXTS, NEW)
    while not bool(state.done.all()):
        planned = decode.jit_plan(system, params, state)
        guesses, dstate = decode.jit_draft(system, params, state, planned)
        checked = decode.jit_verify(system, params, state, guesses)
        state, _ = decode.jit_commit(system, params, state, planned, guesses, dstate, checked)
    assert answers(state) == [p[:NEW] for p in plain]


def test_generation_can_be_cut_into_stretches(plain):
    system, params = chain_system("prompt_lookup"), Params(tiny_params())
    state = begin(system, params, TEXTS, NEW)
    for _ in range(12):
        state, _, _ = decode.generate(system, params, state, 3)
    assert answers(state) == [p[:NEW] for p in plain]


def test_no_room_for_the_tree_is_refused_on_the_host():
    system, params = chain_system("prompt_lookup"), Params(tiny_params())
    with pytest.raises(BadInput, match="needs 64 cache slots, but only 63"):
        begin(system, params, TEXTS[:1], NEW, capacity=63)
    with pytest.raises(BadInput, match="exceeds the model's context of 512"):
        begin(system, params, TEXTS[:1], 600, capacity=1024)
    with pytest.raises(BadInput, match="empty prompt"):
        begin(system, params, [[]], NEW)


def test_one_smaller_buffer_would_have_overwritten_committed_rows(plain):
    """The room rule is tight: the last round of an always-right drafter ends exactly at the buffer's end."""
    system = chain_system("scripted")
    long = [plain_greedy(tiny_params(), TINY, TEXTS[0], 60)]
    capacity = room(system, len(TEXTS[0]), 60)
    ids, _, _ = run(system, script(long, [4], TEXTS[:1]), TEXTS[:1], 60, capacity=capacity)
    assert ids[0] == long[0]
