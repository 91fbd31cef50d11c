"""Laws 1 and 3–7 over every method: drafter × tree × verifier, batched and alone.

To put a new method under the laws, add it to METHODS. Every game is played round by round through `decode.generate`,
so that each method compiles one program per batch size. At temperature > 0 the laws of greedy decoding hold for a
target whose distribution is one token, and such a target is the same program with other weights.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import answers, begin, fitted_eagle_params, numpy_logits, plain_greedy, prompts, tiny_params
from toy import toy_params

from eagle4 import decode
from eagle4.decode import Params
from eagle4.drafters import eagle
from eagle4.drafters.eagle_net import complete
from eagle4.errors import BadInput
from eagle4.harness import costs
from eagle4.harness.costs import CostTable
from eagle4.policy_spec import PolicySpec
from eagle4.retrieval.factors import truncated
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, RetrievalSpec, SamplingSpec, System, TreeSpec
from eagle4.tree.presets import spec_of
from eagle4.types import Plan

MODEL = ModelSpec("llama", 16, 16, 24, 2, 2, 1, 8, 256)
TAPS = (0, 2)


class Method(NamedTuple):
    """What a method is made of, which verifiers it goes with, and the drafter's weights."""

    drafter: DrafterSpec
    tree: TreeSpec
    verifiers: tuple[str, ...]
    weights: Callable[[], Any] = lambda: None
    policy: str = "fixed"


def table():
    return toy_params(MODEL, seed=1, taps=len(TAPS))


def sparse_table():
    return toy_params(MODEL, seed=1, taps=len(TAPS), candidates=5)


def network(spec: EagleSpec, retrieval: RetrievalSpec | None = None):
    """A drafter spec with that network, and its weights beside the target's: random, but for a fitted head."""
    whole = complete(spec, MODEL)

    def weights():
        params = fitted_eagle_params(whole, MODEL, seed=3, target_seed=1)
        if retrieval is not None:
            params["factors"] = truncated(np.asarray(params["head"]), retrieval.rank)
        return params

    return DrafterSpec("eagle", eagle=whole, retrieval=retrieval), weights


PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (2, 0, 0), (2, 0, 1))
TOY, INDEPENDENT = DrafterSpec("toy"), DrafterSpec("toy_independent")
EAGLE1, EAGLE1_WEIGHTS = network(EagleSpec("concat2", draft_vocab=16))
EAGLE3, EAGLE3_WEIGHTS = network(
    EagleSpec(taps=TAPS, fc_norm=True, norm_output=True, draft_vocab=16, window=5)
)
REDUCED, REDUCED_WEIGHTS = network(EagleSpec(taps=TAPS, norm_before_fc=True, draft_vocab=11))
FOUND, FOUND_WEIGHTS = network(
    EagleSpec(taps=TAPS, fc_norm=True, norm_output=True, draft_vocab=16), RetrievalSpec(8, 6)
)
LOOKUP = DrafterSpec("prompt_lookup", min_ngram=1, max_ngram=3, matches=2)
PICKED, DRAWN = ("greedy", "point_mass"), ("greedy", "point_mass", "rejection")
METHODS = {
    "none": Method(DrafterSpec("none"), TreeSpec(depth=0, nodes=1), PICKED),
    "prompt_lookup": Method(LOOKUP, TreeSpec("dynamic", 3, 2, 2, 6, buckets=(6,)), PICKED),
    "chain": Method(TOY, TreeSpec("chain", 3, 1, 1, 4, buckets=(1, 4)), PICKED, table),
    "static": Method(TOY, spec_of(PATHS, buckets=(10,)), PICKED, table),
    "dynamic": Method(TOY, TreeSpec("dynamic", 3, 3, 3, 9, buckets=(1, 9)), PICKED, table),
    "sampled": Method(TOY, TreeSpec("sampled", 3, 2, 3, 10, buckets=(10,)), DRAWN, table),
    "sparse": Method(TOY, TreeSpec("sampled", 2, 3, 3, 13, buckets=(13,)), ("rejection",), sparse_table),
    "drawn chain": Method(TOY, TreeSpec("sampled", 3, 1, 1, 4, buckets=(4,)), ("rejection", "block"), table),
    "independent": Method(
        INDEPENDENT, TreeSpec("sampled", 2, 2, 3, 8, buckets=(8,)), ("multi_round", "k_sequential"), table
    ),
    "eagle1 static": Method(EAGLE1, spec_of(PATHS, buckets=(10,)), PICKED, EAGLE1_WEIGHTS),
    "eagle3 dynamic": Method(EAGLE3, TreeSpec("dynamic", 3, 3, 3, 9, buckets=(9,)), PICKED, EAGLE3_WEIGHTS),
    "eagle drawn": Method(
        REDUCED, TreeSpec("sampled", 3, 2, 3, 10, buckets=(10,)), ("greedy", "rejection"), REDUCED_WEIGHTS
    ),
    "eagle4 dynamic": Method(FOUND, TreeSpec("dynamic", 3, 2, 3, 8, buckets=(8,)), PICKED, FOUND_WEIGHTS),
    # At temperature > 0 picks that all rows decide together would couple the rows' texts, so law 5 is for greedy ones.
    "marginal": Method(
        FOUND, TreeSpec("dynamic", 3, 2, 3, 8, buckets=(1, 3, 8)), ("greedy",), FOUND_WEIGHTS, "marginal"
    ),
    "marginal chain": Method(
        TOY, TreeSpec("chain", 3, 1, 1, 4, buckets=(1, 2, 4)), ("greedy",), table, "marginal"
    ),
    "confident": Method(
        EAGLE3, TreeSpec("dynamic", 3, 2, 3, 8, buckets=(1, 8)), ("greedy",), EAGLE3_WEIGHTS, "confidence"
    ),
    "eagle4 drawn": Method(
        FOUND, TreeSpec("sampled", 2, 2, 3, 8, buckets=(8,)), ("rejection",), FOUND_WEIGHTS
    ),
}

# The rest of the grid, and the batch of one, are `slow`: every case is a program to compile.
QUICK = {
    ("static", "greedy"),
    ("dynamic", "greedy"),
    ("sampled", "rejection"),
    ("drawn chain", "block"),
    ("eagle3 dynamic", "greedy"),
    ("marginal", "greedy"),
}

NEW, CAPACITY = 24, 128
TEXTS = prompts((5, 70, 3, 12), seed=7, vocab=MODEL.vocab_size)
NO_STOP = (900, 901)
PLANS = (
    PolicySpec(),
    PolicySpec(depth=1),
    PolicySpec(depth=2, children=1),
    PolicySpec(width=1, nodes=4),
    PolicySpec(nodes=2),
    PolicySpec(nodes=1),
)


class Case(NamedTuple):
    """A method with a verifier, at one batch size: the rows it decodes and what plain decoding gives for them.

    `sure` are the weights of a target that leaves nothing to chance; `params` those of the target itself.
    """

    system: System
    params: Params
    sure: Params
    texts: list[list[int]]
    plain: list[list[int]]


# Trees in which a path that is no prefix of the node order is sure to be accepted sometimes.
SCATTERED = [
    ("static", "greedy"),
    ("dynamic", "greedy"),
    ("dynamic", "point_mass"),
    ("sampled", "rejection"),
    ("sparse", "rejection"),
    ("independent", "multi_round"),
    ("eagle1 static", "greedy"),
    ("eagle3 dynamic", "greedy"),
    ("eagle drawn", "rejection"),
]


def cases():
    for name, method in METHODS.items():
        for verifier in method.verifiers:
            for batch in (4, 1):
                quick = (name, verifier) in QUICK and batch == 4
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param((name, verifier, batch), id=f"{name}-{verifier}-{batch}", marks=marks)


@pytest.fixture(scope="module", params=list(cases()))
def case(request) -> Case:
    name, verifier, batch = request.param
    method = METHODS[name]
    system = System(
        MODEL,
        method.drafter,
        method.tree,
        method.policy,
        verifier=verifier,
        sampling=SamplingSpec(temperature=0.0 if verifier == "greedy" else 1.0, seed=5),
        taps=TAPS,
    )
    target, drafter = tiny_params(MODEL, seed=1), method.weights()
    # The least gap between two logits on these texts is 0.01 (checked below): e^-100 is no chance at all.
    certain = target if system.sampling.greedy else target | {"head": target["head"] * 1e4}
    texts = TEXTS[:batch]
    params, sure = Params(target, drafter, prices()), Params(certain, drafter, prices())
    return Case(system, params, sure, texts, plain_answers()[:batch])


def prices() -> CostTable:
    """A step costs a twentieth of a plain one, and verification climbs in stairs: some guesses pay and some do not."""
    sizes = [1, 2, 4, 8]
    verify = [[[10, 10.5, 12, 14]], [[12, 13, 14, 18]]]
    part = costs.grid([1], [1], [1], [[[0.5]]])
    return CostTable(costs.grid([1, 4], [64], sizes, verify), part, part)


@cache
def plain_answers() -> list[list[int]]:
    return [plain_greedy(tiny_params(MODEL, seed=1), MODEL, text, NEW + 6) for text in TEXTS]


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """The programs here are compiled once and run for milliseconds; what they compute is the same."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def play(case: Case, params: Params, texts=None, new=NEW, change=lambda state: state, most=99, **kw):
    """Decode round by round, with `change` before each: the final state and each round's RoundInfo."""
    options = {"capacity": CAPACITY, "stop_ids": NO_STOP} | kw
    options["policy"] = replace(options.get("policy", PolicySpec()), name=case.system.policy)
    state = begin(case.system, params, texts or case.texts, new, **options)
    rounds = []
    while not bool(state.done.all()) and len(rounds) < most:
        state, history, _ = decode.generate(case.system, params, change(state), 1)
        rounds.append(jax.tree.map(lambda all_: np.asarray(all_)[0], history))
    return state, rounds


def prefilled(case: Case, texts):
    policy = PolicySpec(case.system.policy)
    return begin(case.system, case.params, texts, NEW, capacity=CAPACITY, stop_ids=NO_STOP, policy=policy)


def test_the_greedy_continuations_have_no_near_ties():
    for text, answer in zip(TEXTS, plain_answers()):
        logits = np.sort(numpy_logits(tiny_params(MODEL, seed=1), MODEL, text + answer), axis=-1)
        assert (logits[len(text) - 1 : -1, -1] - logits[len(text) - 1 : -1, -2]).min() > 0.01


def test_text_is_plain_decodings_under_every_plan_in_one_program(case):
    """Laws 1 and 4: over 30 rounds, whatever depth, width, children and nodes the plan asks for."""
    play(case, case.sure, most=1)
    programs = decode.jit_start._cache_size(), decode.generate._cache_size()
    count, nodes = 0, set()
    for policy in PLANS:
        state, rounds = play(case, case.sure, policy=policy)
        assert answers(state) == [p[:NEW] for p in case.plain]
        count += len(rounds)
        nodes.add(max(int(r.drafted_nodes.max()) for r in rounds))
        assert nodes <= set(range(case.system.tree.nodes))
        assert all((r.num_accepted <= r.drafted_depth).all() for r in rounds)
    assert count > 30
    assert (decode.jit_start._cache_size(), decode.generate._cache_size()) == programs
    if case.system.drafter.name != "none":
        assert len(nodes) > 2


def test_cache_and_drafter_equal_a_fresh_prefill_of_the_text(case):
    """Law 3."""
    state, rounds = play(case, case.params, most=6)
    assert case.system.drafter.name == "none" or sum(int(r.num_accepted.sum()) for r in rounds) > 0
    agrees_with_fresh_prefill(case, state)


def agrees_with_fresh_prefill(case, state):
    texts = [t + a for t, a in zip(case.texts, answers(state))]
    fresh = prefilled(case, [t[:-1] for t in texts])
    assert state.cache.length.tolist() == [len(t) - 1 for t in texts]
    for b, text in enumerate(texts):
        told = slice(0, len(text) - 1)
        for mine, other in zip(state.cache.k + state.cache.v, fresh.cache.k + fresh.cache.v):
            np.testing.assert_allclose(mine[b, :, told], other[b, :, told], atol=1e-4)
        if hasattr(state.drafter, "features"):
            assert state.drafter.length[b] == len(text) - 1
            assert state.drafter.tokens[b, 1 : len(text)].tolist() == text[1:]
            for mine, other in zip(fed(state), fed(fresh)):
                np.testing.assert_allclose(mine[b, told], other[b, told], atol=1e-4)
    if case.system.drafter.name == "eagle":
        eagle_agrees_with_fresh_prefill(case, state.drafter, texts, fresh)


def fed(state):
    return state.drafter.features, state.drafter.hidden


def eagle_agrees_with_fresh_prefill(case, drafter, texts, fresh):
    """Row i of its cache holds features of position i and token i + 1, so the last row needs the last token.

    Compared once the pairs that wait are fed.
    """

    def settled(state):
        spec = case.system.drafter.eagle
        return decode.jit_call(partial(settle_pairs, spec), case.params.drafter, state)

    drafter, fresh = settled(drafter), fresh.replace(drafter=settled(fresh.drafter))
    assert drafter.cache.length.tolist() == [len(text) - 1 for text in texts]
    whole = settled(prefilled(case, texts).drafter)
    for b, text in enumerate(texts):
        told = slice(0, len(text) - 1)
        for mine, other in zip(drafter.cache.k + drafter.cache.v, whole.cache.k + whole.cache.v):
            np.testing.assert_allclose(mine[b, :, told], other[b, :, told], atol=1e-4)
        # A fresh draw of the last token may be another one.
        if fresh.tokens[b, len(text) - 1] == text[-1]:
            np.testing.assert_allclose(drafter.output[b], fresh.drafter.output[b], atol=1e-4)
        else:
            assert not case.system.sampling.greedy


def settle_pairs(spec, params, state):
    return eagle.settle(params, spec, state)


def test_rows_do_not_depend_on_their_neighbours(case):
    """Law 5: other rows, another order, the row alone where the batch is one."""
    B = len(case.texts)
    seeds = np.arange(11, 11 + B)
    together = answers(play(case, case.params, seeds=seeds)[0])
    order = np.roll(np.arange(B), 1)[::-1]
    turned = play(case, case.params, texts=[case.texts[i] for i in order], seeds=seeds[order])[0]
    assert [answers(turned)[list(order).index(i)] for i in range(B)] == together
    others = prompts((9, 4, 66, 2), seed=8, vocab=MODEL.vocab_size)
    for i in range(B):
        texts = [case.texts[i] if j == i else others[j] for j in range(B)]
        mixed = play(case, case.params, texts=texts, seeds=np.where(np.arange(B) == i, seeds, 77))[0]
        assert answers(mixed)[i] == together[i]


def test_poison_changes_nothing(case):
    """Law 6: NaN keys and huge values in every cache slot that is not committed, the drafter's too, NaN in every
    unused node, junk in text to come."""

    def beyond_its_length(cache):
        beyond = (jnp.arange(CAPACITY) >= cache.length[:, None])[:, None, :, None]
        k = tuple(jnp.where(beyond, jnp.nan, x) for x in cache.k)
        v = tuple(jnp.where(beyond, 1e30, x) for x in cache.v)
        return cache.replace(k=k, v=v)

    def spoiled(state):
        drafter = state.drafter
        if case.system.drafter.name == "eagle":
            waiting = drafter.waiting
            empty = jnp.arange(waiting.tokens.shape[1]) >= waiting.num_committed[:, None]
            waiting = waiting.replace(
                tokens=jnp.where(empty, 7, waiting.tokens),
                features=jnp.where(empty[..., None, None], 1e3, waiting.features),
                hidden=jnp.where(empty[..., None], 1e3, waiting.hidden),
            )
            drafter = drafter.replace(cache=beyond_its_length(drafter.cache), waiting=waiting)
        tokens = jnp.where(jnp.arange(CAPACITY) >= state.length[:, None], 7, state.tokens)
        return state.replace(tokens=tokens, cache=beyond_its_length(state.cache), drafter=drafter)

    clean, rounds = play(case, case.params, policy=PolicySpec(nodes=5))
    junk, drafter = case.params, case.params.drafter
    if drafter is not None and "junk" in drafter:
        junk = junk._replace(drafter=drafter | {"junk": jnp.array(True)})
    dirty, again = play(case, junk, policy=PolicySpec(nodes=5), change=spoiled)
    assert answers(dirty) == answers(clean)
    # Greedy text would survive a spoiled drafter: what was guessed and accepted would not.
    for before, after in zip(rounds, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, after, before)


def test_stop_tokens_crop_at_every_place(case):
    """Law 7: also inside an accepted path, which then is not written beyond the stop token."""
    cropped = 0
    for stop in sorted(set(case.plain[0][1:])):
        state, rounds = play(case, case.sure, stop_ids=(stop, NO_STOP[0]))
        ends = [p.index(stop) + 1 if stop in p[:NEW] else NEW for p in case.plain]
        assert answers(state) == [p[:end] for p, end in zip(case.plain, ends)]
        assert state.cache.length.tolist() == [len(t) + end - 1 for t, end in zip(case.texts, ends)]
        cropped += sum(int((r.num_accepted + 1 > r.num_committed)[r.active].sum()) for r in rounds)
    assert cropped > 0 or case.system.drafter.name in ("none", "prompt_lookup")


def test_the_new_token_budget_is_met_exactly(case):
    """Law 7."""
    for new in (1, 2, 3, 4, 5, 6):
        state, _ = play(case, case.sure, new=new)
        assert answers(state) == [p[:new] for p in case.plain]
        assert bool(state.done.all())


def phased():
    for name, verifier in SCATTERED:
        marks = () if (name, verifier) == ("dynamic", "greedy") else (pytest.mark.slow,)
        yield pytest.param((name, verifier, 4), id=f"{name}-{verifier}", marks=marks)


@pytest.mark.parametrize("case", list(phased()), indirect=True)
def test_phased_rounds_commit_scattered_paths_and_give_the_same_text(case):
    """Law 3 where it matters: accepted nodes that do not stand at the front. The phases are those of `generate`."""
    whole, _ = play(case, case.params)
    state = prefilled(case, case.texts)
    scattered = 0
    while not bool(state.done.all()):
        planned = decode.jit_plan(case.system, case.params, state)
        guesses, dstate = decode.jit_draft(case.system, case.params, state, planned)
        checked = decode.jit_verify(case.system, case.params, state, guesses)
        path = np.asarray(checked.verdict.path)
        state, info = decode.jit_commit(case.system, case.params, state, planned, guesses, dstate, checked)
        moved = ((path >= 0) & (path != 1 + np.arange(path.shape[1]))).any(axis=1)
        kept = np.asarray(info.num_committed) > np.asarray(info.num_accepted)
        scattered += int((moved & kept).sum())
    assert scattered >= 4
    assert answers(state) == answers(whole)
    agrees_with_fresh_prefill(case, state)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (TreeSpec("static", 3, 2, 3, 12, paths=PATHS), "need depth=3, width=2, children=3, nodes=10"),
        (TreeSpec("dynamic", 2, 2, 17, 9), "tree.children is 17 but the drafter has only 16 candidates"),
        (TreeSpec("sampled", 2, 2, 17, 9), "tree.children is 17 but the drafter has only 16 candidates"),
    ],
)
def test_trees_that_a_drafter_cannot_fill_are_refused(tree, message):
    system = System(MODEL, TOY, tree, taps=TAPS)
    params = Params(tiny_params(MODEL, seed=1), table())
    keys = jax.random.split(jax.random.key(0), 1)
    plan = Plan(*(jnp.int32(1) for _ in range(4)))
    with pytest.raises(BadInput, match=message):
        decode.drafter_of(system).propose(params.drafter, (), jnp.array([3]), plan, keys)
