"""Training runs on a tiny target: overfitting reaches the longest acceptance, stopping changes no number."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kit import TINY, numpy_logits, plain_greedy, prompts, tiny_params

from eagle4.drafters import eagle_net
from eagle4.errors import BadInput
from eagle4.specs import EagleSpec, TreeSpec
from eagle4.target import model as target
from eagle4.train import batches, features, loop, optimise, start
from eagle4.train.features import Document
from eagle4.train.loop import Setup
from eagle4.train.spec import ObjectiveSpec, PhaseSpec, TrainSpec
from eagle4.train.trial import trial_tau
from eagle4.train.unroll import Rows, unroll

TAPS = (0, 1, 2)
EAGLE1 = EagleSpec("concat2")
EAGLE31 = EagleSpec("taps", taps=TAPS, fc_norm=True, norm_output=True)
REDUCED = EagleSpec("taps", taps=TAPS, draft_vocab=24)
NEW, LENGTH = 20, 64
SHORT = TrainSpec(
    phases=(PhaseSpec(6, 1, 3e-3), PhaseSpec(4, 2, 1e-3)),
    objective=ObjectiveSpec(candidates=32, frequent=8),
    length=LENGTH,
    log_every=1,
    validate_every=5,
    validate_tokens=64,
    decode_every=0,
    save_every=5,
)


@cache
def texts():
    """Prompts of the tiny target, each with its greedy continuation, where no choice hangs on bfloat16's rounding."""
    asked = prompts((5, 9, 4, 12, 7, 6, 11, 8, 5, 10, 6, 7), seed=3, vocab=TINY.vocab_size)
    both = [(p, plain_greedy(tiny_params(), TINY, p, NEW)) for p in asked]
    return [(p, answer) for p, answer in both if margin(p, answer) > 0.04][:10]


def margin(prompt, answer):
    logits = np.sort(numpy_logits(tiny_params(), TINY, prompt + answer), axis=-1)[len(prompt) - 1 : -1]
    return (logits[:, -1] - logits[:, -2]).min()


def documents():
    for i, (prompt, answer) in enumerate(texts()):
        ids = np.array(prompt + answer, np.int32)
        n = len(ids)
        at = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        causal = jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool))
        padded = jnp.asarray(np.pad(ids, (0, LENGTH - n)))[None]
        out = target.forward(tiny_params(), TINY, padded, at, causal, taps=TAPS)
        seen, hidden = np.asarray(out.features[0, :n]), np.asarray(out.hidden[0, :n])
        yield Document(
            f"doc/{i}",
            ids,
            np.arange(n) >= len(prompt),
            seen.astype(ml_dtypes.bfloat16),
            hidden.astype(ml_dtypes.bfloat16),
        )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    mark = features.fingerprint("tiny", TINY, tiny_params(), TAPS)
    features.start(folder, mark, 0.2, 512)
    features.append(folder, list(documents()))
    opened = features.open_store(folder, mark)
    training, held = features.split(opened)
    assert len(training) >= 6
    assert len(held) >= 1
    return opened


def setup(store, eagle=EAGLE31, train=SHORT):
    spec = eagle_net.complete(eagle, TINY)
    counts = batches.token_counts(store, TINY.vocab_size, train.share)
    frozen, params = start.begin(spec, train, TINY, tiny_params(), store, counts)
    held = batches.held_out_prompts(store, 2)
    return Setup(spec, train, TINY, tiny_params(), frozen, store, params, held, ())


def finished(run):
    """Records and final state of a run."""
    records, state = [], None
    for record, now in run:
        records.append({k: v for k, v in record.items() if k not in ("time_s", "train/tokens_per_s")})
        state = now
    return records, state


@pytest.mark.parametrize(
    "eagle", [pytest.param(EAGLE1, id="eagle1", marks=pytest.mark.slow), pytest.param(EAGLE31, id="eagle3.1")]
)
def test_overfitting_reaches_the_longest_acceptance(store, eagle, tmp_path):
    """Training and decoding agree: a drafter that knows eight texts by heart has every guess accepted on them."""
    train = replace(
        SHORT,
        phases=(PhaseSpec(150, 1, 1e-2), PhaseSpec(350, 3, 5e-3)),
        objective=ObjectiveSpec(candidates=0),
        validate_tokens=0,
        save_every=1000,
        log_every=100,
        clip=5.0,
        batch=4,
        final_lr=0.0,
    )
    ready = setup(store, eagle, train)
    _, state = finished(loop.run(ready, str(tmp_path)))
    chosen = features.split(store)[0]
    known = [texts()[int(features.read(store, i).name.split("/")[1])][0] for i in chosen]
    chain = TreeSpec("chain", 3, 1, 1, 4, buckets=(4,))
    parts = ready.spec, state.params, TINY, tiny_params(), known, ()
    # The first token is the prefill's: (1 + 4k) new tokens are k whole rounds.
    assert trial_tau(*parts, new=17, tree=chain) == 4.0


def test_five_and_five_steps_are_ten_to_the_bit(store, tmp_path):
    whole, end = finished(loop.run(setup(store), str(tmp_path / "whole")))
    run = loop.run(setup(store), str(tmp_path / "halves"))
    for _ in range(5):
        next(run)
    run.close()
    rest, resumed = finished(loop.run(setup(store), str(tmp_path / "halves")))
    assert [r["step"] for r in rest] == [6, 7, 8, 9, 10]
    assert rest == whole[5:]
    for a, b in zip(jax.tree.leaves(end), jax.tree.leaves(resumed)):
        np.testing.assert_array_equal(a, b)


def test_a_run_of_another_spec_is_not_continued(store, tmp_path):
    run = loop.run(setup(store), str(tmp_path))
    for _ in range(5):
        next(run)
    run.close()
    with pytest.raises(BadInput, match="holds a run with another train; choose another folder"):
        next(loop.run(setup(store, train=replace(SHORT, clip=1.0)), str(tmp_path)))
    with pytest.raises(BadInput, match="holds a run with another eagle;"):
        next(loop.run(setup(store, eagle=replace(EAGLE31, norm_output=False)), str(tmp_path)))


def test_only_the_drafters_own_weights_are_optimised(store):
    ready = setup(store)
    state = optimise.begin(SHORT, ready.start)
    own = {leaf.shape for leaf in jax.tree.leaves(eagle_net.abstract(ready.spec, TINY))}
    assert {a.shape for a in jax.tree.leaves(state.opt_state) if a.ndim} == own
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(state.params))


def test_accumulated_batches_make_one_step(store, tmp_path):
    train = replace(SHORT, phases=(PhaseSpec(2, 1, 1e-2),), accumulate=2, save_every=1, validate_tokens=0)
    ready = setup(store, train=train)
    run = loop.run(ready, str(tmp_path))
    first = jax.tree.map(np.asarray, next(run)[1].params)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(ready.start)):
        np.testing.assert_array_equal(a, b)
    second = next(run)[1].params
    assert any((np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(first)))


def test_norms_are_not_decayed_and_the_rate_follows_its_phases(store):
    train = replace(SHORT, weight_decay=0.5, warmup=0.5)
    params = {"w": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    tx = optimise.optimiser(train)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert (updates["w"] < 0).all()
    assert (updates["norm"] == 0).all()
    rate = [float(optimise.schedule(train)(i)) for i in range(10)]
    assert np.argmax(rate[:6]) == 3
    np.testing.assert_allclose([rate[3], rate[8]], [3e-3, 1e-3], rtol=1e-6)
    assert rate[5] < rate[4] < rate[3]


def test_a_batch_that_is_not_finite_changes_nothing_and_is_named(store, tmp_path, monkeypatch):
    original = loop.rows_of

    def spoiled(batch):
        rows = original(batch)
        return rows._replace(hidden=np.full_like(rows.hidden, np.nan))

    monkeypatch.setattr(loop, "rows_of", spoiled)
    ready = setup(store, train=replace(SHORT, validate_tokens=0))
    run = loop.run(ready, str(tmp_path))
    record, state = next(run)
    assert record["train/not_finite"][0].startswith("doc/")
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(ready.start)):
        np.testing.assert_array_equal(a, b)
    monkeypatch.setattr(loop, "MOST_BAD", 2)
    with pytest.raises(BadInput, match=r"more than 2 batches were not finite, the last one with doc/"):
        for _ in run:
            pass


def test_a_reduced_vocabulary_holds_the_frequent_tokens_and_learns_only_them(store, tmp_path):
    ready = setup(store, eagle=REDUCED, train=replace(SHORT, validate_tokens=0))
    counts = batches.token_counts(store, TINY.vocab_size)
    ids = np.asarray(ready.frozen.draft_ids)
    assert (np.diff(ids) > 0).all()
    assert counts[ids].min() >= np.delete(counts, ids).max()
    np.testing.assert_array_equal(ready.start["head"], np.asarray(tiny_params()["head"])[ids])
    _, state = finished(loop.run(ready, str(tmp_path)))
    made = loop.result(ready, state)
    np.testing.assert_array_equal(made.params["draft_ids"], ids)
    assert (np.asarray(made.params["head"]) != np.asarray(ready.start["head"])).any()


@pytest.mark.parametrize("norm_output", [False, True])
def test_a_layer_of_the_target_starts_as_that_layer(norm_output):
    """With the embedding's half of q, k, v at 0 and fc passing the tap through, the drafter is the target's layer;
    where states are normed, one of another size."""
    spec = eagle_net.complete(EagleSpec("taps", taps=(0, 1), norm_output=norm_output), TINY)
    sizes = start.Sizes(5.0, 2.0)
    params = start.target_start(spec, TINY, tiny_params(), 1, -1, sizes, jax.random.key(0))
    params = eagle_net.borrow(params, tiny_params())
    ids = jnp.array([[5, 9, 2, 40, 7]])
    at, causal = jnp.arange(5, dtype=jnp.int32)[None], jnp.tril(jnp.ones((1, 5, 5), bool))
    out = target.apply(tiny_params(), TINY, ids, at, causal, taps=(0, 1, 2))
    rows = Rows(ids, ids > 0, out.features[:, :, :2], out.hidden, jnp.ones_like(ids), at)
    (output,) = unroll(params, spec, rows, 1)
    size = 0.4 if norm_output else 1.0
    np.testing.assert_allclose(output, out.features[:, :, 2] * size, atol=1e-4)
    np.testing.assert_allclose(eagle_net.logits(params, spec, output), out.logits, atol=2e-3)


def test_a_start_that_does_not_fit_is_refused(store):
    for change, said in [
        ({"start_layer": 2}, "train.start_layer=2 is not a layer of the target; it has 2"),
        ({"start_tap": 3}, "train.start_tap=3 is not one of the 3 taps"),
    ]:
        with pytest.raises(BadInput, match=said):
            setup(store, train=replace(SHORT, **change))
    with pytest.raises(BadInput, match=r"eagle\.draft_vocab=99 is more than the target's 48 ids"):
        setup(store, eagle=replace(REDUCED, draft_vocab=99))
