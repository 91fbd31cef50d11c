"""The EAGLE drafter against an oracle that runs one row after the other, at every offset and in whole trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_oracle import MODEL, NORMED, SPECS, WINDOWED, V, committed, expanded, oracle, streams
from kit import begin, eagle_params, prompts, tiny_params

from eagle4 import decode
from eagle4.decode import Params
from eagle4.drafters import eagle, eagle_net
from eagle4.errors import BadInput
from eagle4.specs import DrafterSpec, EagleSpec, SamplingSpec, System, TreeSpec
from eagle4.tree.grow import AS_PLANNED
from eagle4.types import Commit, Plan

CAPACITY = 128
# Offsets 0 and 100, both sides of a prefill chunk, and a row whose text and tree fill the buffer.
LENGTHS = (1, 5, 64, 65, 101, 120)
DYNAMIC = TreeSpec("dynamic", 3, 3, 3, 22)
PLANS = (
    (3, 3, 3, 22),
    (3, 3, 3, 9),
    (2, 2, 3, 7),
    (1, 1, 2, 9),
    (0, 3, 3, 12),
)  # depth, width, children, nodes


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """The programs here are compiled once and run for milliseconds; what they compute is the same."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def paths(draft, b: int) -> list[tuple[int, ...] | None]:
    """The drafted tokens on the way to each node of row b; None where there is no node."""
    tokens, parent = np.asarray(draft.tokens[b]), np.asarray(draft.parent[b])
    found: list = [()]
    for n in range(1, len(tokens)):
        found.append((*found[parent[n]], int(tokens[n])) if parent[n] >= 0 else None)
    return found


def stretch(name: str, texts, start, rows: int, count, junk=0.0) -> Commit:
    """`count` pairs of each text from `start` on, in `rows` rows; junk beyond, but finite as the contract says."""
    taps = SPECS[name].taps
    tokens = np.zeros((len(texts), rows), np.int32)
    features = np.full((len(texts), rows, len(taps), MODEL.hidden_size), junk, np.float32)
    hidden = np.full((len(texts), rows, MODEL.hidden_size), junk, np.float32)
    for b, (text, s, c) in enumerate(zip(texts, start, count)):
        tokens[b, :c] = text[s + 1 : s + c + 1]
        for i, tap in enumerate(taps):
            features[b, :c, i] = streams(text)[tap][s : s + c]
        hidden[b, :c] = streams(text)[-1][s : s + c]
    return Commit(jnp.array(tokens), jnp.array(count, jnp.int32), jnp.array(features), jnp.array(hidden))


def made(name: str, tree: TreeSpec = DYNAMIC):
    spec = DrafterSpec("eagle", eagle=SPECS[name])
    return eagle.make(spec, tree, AS_PLANNED)


def proposer(name: str, texts, tree: TreeSpec = DYNAMIC):
    """(depth, width, children, nodes) -> the draft after texts that were fed at once, in one compiled program."""
    drafter, params = made(name, tree), eagle_params(SPECS[name], MODEL)
    count = [len(t) - 1 for t in texts]
    pairs = stretch(name, texts, [0] * len(texts), 40, count)
    root, length = jnp.array([t[-1] for t in texts], jnp.int32), jnp.array(count) + 1

    @jax.jit
    def propose(params, pairs, plan):
        state = drafter.init(params, jnp.zeros((len(texts), 48), jnp.int32), length)
        state = drafter.commit(params, state, pairs, jnp.zeros(len(texts), jnp.int32))
        keys = jax.random.split(jax.random.key(0), len(texts))
        return drafter.propose(params, state, root, plan, keys)[0]

    return lambda *plan: propose(params, pairs, Plan(*map(jnp.int32, plan)))


# After these, the nodes that are expanded have different parents, else a wrong one would change nothing.
RAGGED = tuple(map(tuple, prompts((9, 33), seed=10, vocab=V)))


def grows_as_by_hand(name: str, tree: TreeSpec = DYNAMIC, plans=PLANS):
    propose = proposer(name, RAGGED, tree)
    for plan in plans:
        draft = propose(*plan)
        for b, text in enumerate(RAGGED):
            found = dict(zip(paths(draft, b), np.asarray(draft.score)[b].tolist()))
            wanted = expanded(name, text, *plan)
            assert found.keys() - {None, ()} == wanted.keys()
            np.testing.assert_allclose([found[p] for p in wanted], list(wanted.values()), atol=1e-4)


# Every flag is in one of the quick ones; each is a program to compile.
QUICK = [WINDOWED, NORMED, "one norm, own head, window", "own shape, no rope"]
REST = [pytest.param(name, marks=pytest.mark.slow) for name in SPECS if name not in QUICK]


@pytest.mark.parametrize("name", QUICK + REST)
def test_drafts_are_those_of_the_algebra_at_every_offset(name):
    """After prefill by the real loop; drawn trees carry the whole distribution of every node that was expanded."""
    spec = SPECS[name]
    tree = TreeSpec("sampled", 3, 2, 2, 12, buckets=(12,))
    system = System(
        MODEL,
        DrafterSpec("eagle", eagle=spec),
        tree,
        verifier="rejection",
        sampling=SamplingSpec(temperature=1.0),
        taps=spec.taps,
    )
    params = Params(tiny_params(MODEL), eagle_params(spec, MODEL))
    state = begin(system, params, prompts(LENGTHS, seed=2, vocab=V), 4, capacity=CAPACITY)
    draft, _ = decode.jit_draft(system, params, state, decode.plan(system, params, state))
    assert draft.q is not None
    np.testing.assert_allclose(np.asarray(draft.q.probs).sum(2), 1, atol=1e-6)
    B, N = draft.tokens.shape
    q = np.zeros((B, N, V))
    np.add.at(q, (np.arange(B)[:, None, None], np.arange(N)[:, None], draft.q.ids), np.asarray(draft.q.probs))
    parent = np.asarray(draft.parent)
    for b, length in enumerate(np.asarray(state.length)):
        text = tuple(np.asarray(state.tokens)[b, :length].tolist())
        inner = set(parent[b, 1:].tolist()) - {-1}
        assert {int(draft.depth[b, n]) for n in inner} == {0, 1, 2}
        assert len(inner) == 5
        for n in inner:
            np.testing.assert_allclose(q[b, n], oracle(name, text, paths(draft, b)[n]), atol=1e-4)


@pytest.mark.parametrize("name", [WINDOWED, NORMED])
def test_dynamic_trees_are_those_grown_by_hand(name):
    """For every plan, one that drafts nothing included."""
    for text in RAGGED:
        assert len({path[0] for path in expanded(name, text, *PLANS[0]) if len(path) == 3}) > 1
    grows_as_by_hand(name)


def test_a_chain_is_one_branch_whatever_width_its_spec_has():
    grows_as_by_hand(NORMED, TreeSpec("chain", 3, 2, 2, 4), [(3, 1, 1, 4)])


def test_what_cannot_draft_is_refused():
    for spec in (None, EagleSpec()):
        with pytest.raises(BadInput, match="needs a trained network; give drafter"):
            eagle.make(DrafterSpec("eagle", eagle=spec), DYNAMIC, AS_PLANNED)
    for kind in ("dynamic", "sampled"):
        with pytest.raises(BadInput, match=r"tree.children is 10 but the drafter .* only 9"):
            proposer(NORMED, RAGGED, TreeSpec(kind, 2, 2, 10, 12))(2, 2, 10, 12)


PAIR = tuple(map(tuple, prompts((12, 12), seed=4, vocab=V)))
COUNTS = [(1, 4), (0, 2), (3, 0), (4, 1), (2, 3)]


@pytest.mark.parametrize("name", ["eagle1", WINDOWED, NORMED])
def test_commits_of_any_size_leave_the_state_of_one_pass(name):
    """Law 3, with nothing committed too: rows, their number and the output, also with rejected rows beside them.

    Pairs wait for the next draft, or until no more fit.
    """
    drafter, params = made(name), eagle_params(SPECS[name], MODEL)
    empty = drafter.init(params, jnp.zeros((2, 32), jnp.int32), jnp.ones(2, jnp.int32))
    commit, settle = jax.jit(drafter.commit), jax.jit(lambda state: eagle.settle(params, SPECS[name], state))
    start, piecewise = np.array([0, 0]), empty
    for count in COUNTS:
        pairs = stretch(name, PAIR, start, 4, count, junk=50.0)
        piecewise = commit(params, piecewise, pairs, jnp.array(start, jnp.int32))
        start = start + count
        waiting = piecewise.waiting.num_committed
        assert (piecewise.cache.length + waiting).tolist() == start.tolist()
        agrees_with_one_pass(name, settle(piecewise), start)
    assert waiting.tolist() == [2, 3]
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in (empty, piecewise)]
    assert kinds[0] == kinds[1]


def agrees_with_one_pass(name, state, start):
    assert state.cache.length.tolist() == start.tolist()
    for b, text in enumerate(PAIR):
        keys, values, outputs = committed(name, text[: start[b] + 1])
        for mine, wanted in ((state.cache.k[0], keys), (state.cache.v[0], values)):
            np.testing.assert_allclose(mine[b, :, : start[b]].swapaxes(0, 1), wanted, atol=1e-4)
        np.testing.assert_allclose(state.output[b], outputs[-1], atol=1e-4)


# The tests above must fail when the drafter is wrong.


def patched_step(monkeypatch, change):
    """Every draft step sees `change(frontier)`."""
    real = eagle.draft_step

    def draft_step(*arguments):
        follow = real(*arguments)
        return lambda carry, frontier: follow(carry, change(frontier))

    monkeypatch.setattr(eagle, "draft_step", draft_step)


def caught(name: str = NORMED):
    with pytest.raises(AssertionError):
        grows_as_by_hand(name, plans=PLANS[:1])


def test_features_paired_with_their_own_token_are_caught(monkeypatch):
    real = eagle.feed

    def feed(params, spec, state, commit, start):
        return real(params, spec, state, commit.replace(tokens=jnp.roll(commit.tokens, 1, axis=1)), start)

    monkeypatch.setattr(eagle, "feed", feed)
    caught()


def test_committed_rows_one_position_late_is_caught(monkeypatch):
    real = eagle.feed
    monkeypatch.setattr(
        eagle, "feed", lambda p, spec, state, commit, start: real(p, spec, state, commit, start + 1)
    )
    caught()


def test_drafting_one_position_late_is_caught(monkeypatch):
    real = eagle_net.enter

    def enter(params, spec, tokens, state, positions):
        return real(params, spec, tokens, state, positions + (tokens.shape[1] == DYNAMIC.width))

    monkeypatch.setattr(eagle_net, "enter", enter)
    caught()


def test_rows_that_see_their_siblings_is_caught(monkeypatch):
    def change(frontier):
        level = jnp.arange(frontier.attend.shape[2]) // DYNAMIC.width == frontier.depth - 1
        return frontier._replace(attend=frontier.attend | level)

    patched_step(monkeypatch, change)
    caught()


def test_the_wrong_parents_state_is_caught(monkeypatch):
    patched_step(monkeypatch, lambda frontier: frontier._replace(source=jnp.zeros_like(frontier.source)))
    caught()


def test_a_window_that_moves_with_the_node_is_caught(monkeypatch):
    real, within = eagle.draft_step, eagle.within

    def draft_step(params, spec, state, tree, find):
        def follow(carry, frontier):
            def moved(spec, see, at, slot):
                return within(spec, see, at + frontier.depth, slot)

            monkeypatch.setattr(eagle, "within", moved)
            return real(params, spec, state, tree, find)(carry, frontier)

        return follow

    monkeypatch.setattr(eagle, "draft_step", draft_step)
    caught(WINDOWED)
