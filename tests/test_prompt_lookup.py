"""Prompt lookup against a plain-Python matcher and trie, and its history against the committed text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import plain_greedy, prompts, run, tiny_params

from eagle4.decode import Params
from eagle4.drafters import prompt_lookup
from eagle4.specs import DrafterSpec, ModelSpec, System, TreeSpec
from eagle4.types import Commit, Plan

S = 24  # capacity of a row


def continuations(text, spec, depth) -> list[list[int]]:
    """What followed the best earlier occurrences of the text's suffix: longest first, then earliest."""
    found, places = [], set()
    for n in range(spec.max_ngram, spec.min_ngram - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[len(text) - n :] and start + n not in places:
                places.add(start + n)
                found.append(text[start + n : start + n + depth])
    return found[: spec.matches]


def tree(root, chains, limit) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of the trie of the chains, cut to `limit` nodes."""
    index, tokens, parents, depths = {(): 0}, [root], [-1], [0]
    for chain in chains:
        for d in range(len(chain)):
            path = tuple(chain[: d + 1])
            if path not in index:
                if len(tokens) == limit:
                    return tokens, parents, depths
                index[path] = len(tokens)
                tokens.append(chain[d])
                parents.append(index[path[:-1]])
                depths.append(d + 1)
    return tokens, parents, depths


def expected(text, spec, envelope, plan):
    chains = [chain[: plan[0]] for chain in continuations(text, spec, envelope.depth)]
    tokens, parents, depths = tree(text[-1], chains, min(plan[1], envelope.nodes))
    empty = envelope.nodes - len(tokens)
    seen = np.eye(envelope.nodes, dtype=bool)
    for n, parent in enumerate(parents):
        if parent >= 0:
            seen[n] |= seen[parent]
    used = [False] + [True] * (len(tokens) - 1) + [False] * empty
    return tokens + [0] * empty, parents + [-1] * empty, depths + [0] * empty, used, seen.tolist()


def proposer(spec, envelope):
    """(propose(texts, plan) -> fields of each row's draft, the jitted function)."""
    drafter = prompt_lookup.make(spec, envelope, lambda *_: jnp.bool_(True))

    def whole(tokens, length, root, plan):
        return drafter.propose(None, drafter.init(None, tokens, length), root, plan, None)[0]

    jitted = jax.jit(whole)

    def propose(texts, plan, rubbish=0):
        tokens = np.full((len(texts), S), rubbish, np.int32)
        for row, text in zip(tokens, texts):
            row[: len(text)] = text
        length = np.array([len(t) for t in texts], np.int32)
        root = np.array([t[-1] for t in texts], np.int32)
        depth, nodes = (jnp.int32(x) for x in plan)
        draft = jitted(tokens, length, root, Plan(depth, jnp.int32(1), jnp.int32(1), nodes))
        assert draft.q is None
        assert not draft.score.any()
        fields = (draft.tokens, draft.parent, draft.depth, draft.candidate, draft.attend)
        return list(zip(*(f.tolist() for f in fields)))

    return propose, jitted


def texts(rng, rows=4, alphabet=3):
    return [rng.integers(0, alphabet, n).tolist() for n in (*rng.integers(1, S, rows - 1), S)]


@pytest.mark.parametrize(("low", "high", "matches"), [(1, 3, 1), (2, 4, 1), (1, 2, 3), (2, 3, 4), (3, 30, 2)])
def test_drafts_equal_the_plain_matcher_on_random_texts(low, high, matches):
    spec, envelope = DrafterSpec("prompt_lookup", low, high, matches), TreeSpec(depth=4, nodes=11, children=4)
    propose, jitted = proposer(spec, envelope)
    rng = np.random.default_rng(high)
    branched = 0
    for trial in range(40):
        batch = texts(rng, alphabet=2 + trial % 3)
        plan = (4, 11) if trial < 20 else (int(rng.integers(0, 5)), int(rng.integers(1, 12)))
        drafts = propose(batch, plan, rubbish=batch[0][-1])
        for text, draft in zip(batch, drafts):
            assert draft == expected(text, spec, envelope, plan), f"{text}, plan {plan}"
            branched += len({p for p in draft[1] if p >= 0}) < sum(p >= 0 for p in draft[1])
    assert jitted._cache_size() == 1
    assert (branched > 10) == (matches > 1)


def test_the_rules_on_texts_made_by_hand():
    spec, envelope = DrafterSpec("prompt_lookup", 1, 3), TreeSpec(depth=3, nodes=4)
    propose, _ = proposer(spec, envelope)

    def guess(*batch):
        drafts = propose(batch, (3, 4))
        return [[t for t, used in zip(draft[0], draft[3]) if used] for draft in drafts]

    assert guess(
        [5, 1, 7, 1, 2, 1, 2, 8, 9, 1, 2],  # "1 2" twice: the earlier one, not the last
        [1, 2, 3, 4, 9, 3, 5, 2, 3],  # "2 3" beats the nearer "3"
        [3, 6, 4, 3],  # the continuation stops where the text does
        [1, 2, 3, 4],  # nothing repeats
    ) == [[1, 2, 8], [4, 9, 3], [6, 4, 3], []]
    assert guess([7], [7, 7], [4, 4, 4], [1, 2]) == [[], [7], [4], []]


def test_a_suffix_shorter_than_the_least_is_no_match():
    propose, _ = proposer(DrafterSpec("prompt_lookup", 3, 4), TreeSpec(depth=3, nodes=4))
    batch = [[1, 2, 9, 1, 2], [1, 2], [0, 0, 0], [5, 1, 2, 9, 5, 1, 2]]
    assert [sum(draft[3]) for draft in propose(batch, (3, 4))] == [0, 0, 0, 3]


def test_branches_share_their_prefix():
    """Suffix 1 was followed by 2 3 4, by 2 3 5, by 2 6 and by 2 3 4 again: one tree, nothing twice.

             0
             │
             1 "2"
            / \\
       "3" 2   5 "6"
          / \\
     "4" 3   4 "5"
    """
    chains = jnp.array([[[2, 3, 4], [2, 3, 5], [2, 6, 0], [2, 3, 4]]])
    valid = jnp.ones((1, 4, 3), bool).at[0, 2, 2].set(False)
    draft = prompt_lookup.trie(jnp.array([1]), chains, valid, jnp.int32(99), 8)
    assert draft.tokens[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert draft.parent[0].tolist() == [-1, 0, 1, 2, 2, 1, -1, -1]
    assert draft.depth[0].tolist() == [0, 1, 2, 3, 3, 2, 0, 0]
    assert draft.candidate[0].tolist() == [False] + [True] * 5 + [False] * 2


def test_an_envelope_of_the_root_alone_drafts_nothing():
    propose, _ = proposer(DrafterSpec("prompt_lookup", 1, 2), TreeSpec(depth=0, nodes=1))
    for draft, root in zip(propose([[1, 1, 1], [2]], (0, 1)), (1, 2)):
        assert draft == ([root], [-1], [0], [False], [[True]])


def test_history_equals_the_committed_text():
    """Prompts of 3, 6 and 2 tokens fed in chunks of 4, then rounds that commit 0 to 3 tokens a row."""
    rng = np.random.default_rng(0)
    full = rng.integers(0, 50, (3, S)).astype(np.int32)
    prompt = np.array([3, 6, 2], np.int32)
    drafter = prompt_lookup.make(DrafterSpec("prompt_lookup"), TreeSpec(), lambda *_: jnp.bool_(True))
    commit = jax.jit(lambda state, c, start: drafter.commit(None, state, c, start))
    padded = np.where(np.arange(S) < prompt[:, None], full, 0)
    state = drafter.init(None, jnp.array(padded), jnp.array(prompt))
    length = prompt.copy()

    def feed(state, start, count):
        index = np.minimum(start[:, None] + 1 + np.arange(4), S - 1)
        fresh = np.arange(4) < count[:, None]
        tokens = np.where(fresh, np.take_along_axis(full, index, 1), 99)  # what is not committed is rubbish
        return commit(
            state,
            Commit(jnp.array(tokens), jnp.array(count), jnp.zeros((3, 4, 0, 1)), jnp.zeros((3, 4, 1))),
            jnp.array(start),
        )

    def check(state):
        assert state.length.tolist() == length.tolist()
        for row, whole, n in zip(np.asarray(state.tokens), full, length):
            assert row[:n].tolist() == whole[:n].tolist()

    for start in (0, 4):
        starts = np.full(3, start, np.int32)
        state = feed(state, starts, np.clip(prompt - 1 - start, 0, 4))
        check(state)
    for _ in range(9):
        count = np.minimum(rng.integers(0, 4, 3).astype(np.int32), S - length)
        state = feed(state, length - 1, count)
        length = length + count
        check(state)
    assert commit._cache_size() == 1


def test_a_branching_lookup_decodes_like_plain_greedy():
    model = ModelSpec("llama", 16, 16, 16, 1, 2, 1, 8, 256)
    batch, new, weights = prompts((5, 12), vocab=16), 24, tiny_params(model)
    envelope = TreeSpec(depth=3, nodes=7, children=3, buckets=(7,))
    system = System(model, DrafterSpec("prompt_lookup", 1, 3, 3), envelope)
    ids, _, info = run(system, Params(weights), batch, new)
    assert ids == [plain_greedy(weights, model, text, new) for text in batch]
    assert (info.drafted_nodes > info.drafted_depth).any(), "some tree must branch"
    assert info.num_accepted.max() > 1
