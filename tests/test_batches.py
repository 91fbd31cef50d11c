"""Packed batches: every token of every document once an epoch, nothing across documents, and a place to go on from."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from tiny_store import MARK, document, store_of

from eagle4.errors import BadInput
from eagle4.train import batches, features

T, ROWS = 24, 3
LENGTHS = [int(n) for n in np.random.default_rng(1).integers(2, 34, 60)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    documents = [document(f"d{i}", n) for i, n in enumerate(LENGTHS)]
    return store_of(tmp_path_factory.mktemp("store"), documents[:25], documents[25:])


def equal(a, b) -> bool:
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def tokens_of(found) -> Counter:
    """How often each (document, position) appears."""
    pairs = Counter()
    for batch in found:
        real = batch.segment > 0
        pairs.update(zip(batch.document[real].tolist(), batch.position[real].tolist()))
    return pairs


def usable(store, chosen) -> dict[int, int]:
    """Kept length of each document that has an answer within T tokens (answers begin at half the length)."""
    lengths = {i: len(features.read(store, i).tokens) for i in chosen}
    return {i: min(n, T) for i, n in lengths.items() if n // 2 < T}


def test_an_epoch_has_every_token_of_every_training_document_once(store):
    training, held = features.split(store)
    found = list(batches.training(store, T, ROWS, epochs=1))
    wanted = {(i, t): 1 for i, n in usable(store, training).items() for t in range(n)}
    assert tokens_of(found) == wanted
    assert held
    assert not {i for i, _ in tokens_of(found)} & set(held)
    assert any(LENGTHS[i] > T for i in training)
    assert tokens_of(batches.training(store, T, ROWS, epochs=3)) == dict.fromkeys(wanted, 3)


def test_rows_hold_documents_one_after_the_other(store):
    packed = 0
    for batch in batches.training(store, T, ROWS, epochs=1):
        assert batch.tokens.shape == (ROWS, T)
        assert batch.features.shape == (ROWS, T, len(MARK.taps), MARK.width)
        for row in range(ROWS):
            segment = batch.segment[row]
            count = int(segment.max())
            ends = np.flatnonzero(np.diff(np.append(segment, 0)))
            # 1 1 1 2 2 … k k 0 0 0: each document is one run, padding comes last.
            assert segment[ends].tolist() == list(range(1, count + 1))
            packed += count > 1
            start = 0
            for end in ends + 1:
                n = end - start
                assert len(set(batch.document[row, start:end].tolist())) == 1
                source = features.read(store, int(batch.document[row, start]))
                assert batch.position[row, start:end].tolist() == list(range(n))
                assert n == min(len(source.tokens), T)
                for name in ("tokens", "supervised", "features", "hidden"):
                    part = getattr(batch, name)[row, start:end]
                    assert part.tobytes() == getattr(source, name)[:n].tobytes()
                start = end
            for name in ("tokens", "supervised", "features", "hidden", "position"):
                assert not getattr(batch, name)[row, start:].any()
            assert (batch.document[row, start:] == -1).all()
    assert packed > 3


@pytest.mark.parametrize("stop", [0, 1, 5, 9])
def test_a_restored_iterator_goes_on_with_the_same_batches(store, stop):
    whole = list(itertools.islice(batches.training(store, T, ROWS, seed=4), 10))
    first = batches.training(store, T, ROWS, seed=4)
    head = [next(first) for _ in range(stop)]
    state = json.loads(json.dumps(first.get_state()))
    second = batches.training(store, T, ROWS, seed=4)
    second.set_state(state)
    resumed = [*head, *itertools.islice(second, 10 - stop)]
    assert len(resumed) == 10
    assert all(equal(a, b) for a, b in zip(whole, resumed))
    # And the one that was asked for its state is not disturbed by it.
    assert equal(next(first), whole[stop])


def test_each_epoch_and_each_seed_has_its_own_order(store, monkeypatch):
    monkeypatch.setattr(batches, "BINS", 1)  # then rows keep the order in which documents come

    def order(seed, epochs):
        found = batches.training(store, T, ROWS, seed=seed, epochs=epochs)
        return [int(d) for b in found for d in b.document[(b.position == 0) & (b.segment > 0)]]

    once, twice = order(0, 1), order(0, 2)
    assert sorted(once) == sorted(usable(store, features.split(store)[0]))
    assert twice[: len(once)] == once == order(0, 1)
    assert sorted(twice[len(once) :]) == sorted(once)
    orders = [once, twice[len(once) :], order(1, 1), order(-1, 1)]  # any whole number is a seed
    assert len(set(map(tuple, orders))) == 4


def test_a_share_is_the_first_part_of_the_training_documents(store):
    training, _ = features.split(store)
    seen = {}
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        chosen = training[: int(np.ceil(len(training) * share))]
        seen[share] = {i for i, _ in tokens_of(batches.training(store, T, ROWS, share=share, epochs=1))}
        assert seen[share] == set(usable(store, chosen))
    assert seen[1 / 8] < seen[1 / 4] < seen[1 / 2] < seen[1.0]


def test_held_out_batches_are_fixed_and_complete(store):
    found = list(batches.held_out(store, T, ROWS))
    wanted = {(i, t): 1 for i, n in usable(store, features.split(store)[1]).items() for t in range(n)}
    assert tokens_of(found) == wanted
    assert all(batch.tokens.shape == (ROWS, T) for batch in found)
    assert all(equal(a, b) for a, b in zip(found, batches.held_out(store, T, ROWS), strict=True))


def test_without_held_out_documents_there_is_no_batch(tmp_path):
    store = store_of(tmp_path, [document("a", 4)], settings=(0.0, 64))
    assert list(batches.held_out(store, T, ROWS)) == []
    (batch,) = batches.training(store, T, ROWS, epochs=1)
    assert (batch.segment > 0).sum() == 4


def test_packing_tells_what_the_rows_hold(store):
    found = list(batches.training(store, T, 1, epochs=1))
    filled = sum(int((batch.segment > 0).sum()) for batch in found)
    supervised = sum(int(batch.supervised.sum()) for batch in found)
    told = batches.packing(store, T)
    assert told.tokens == filled
    assert told.documents == len({i for i, _ in tokens_of(found)})
    assert told.efficiency == pytest.approx(filled / (len(found) * T))
    assert told.supervised == pytest.approx(supervised / filled)
    assert told.efficiency > 0.75


def test_tokens_are_counted_where_they_are_supervised(tmp_path):
    ids = np.array([5, 1, 1, 2], np.int32)
    one = document("a", 4)._replace(tokens=ids, supervised=np.array([False, True, True, True]))
    store = store_of(tmp_path, [one], settings=(0.0, 64))
    assert batches.token_counts(store, 7).tolist() == [0, 2, 1, 0, 0, 0, 0]


def test_mistakes_are_named(store, tmp_path):
    for share in (0.0, 1.5):
        with pytest.raises(BadInput, match=r"share must lie in \(0, 1\]"):
            batches.training(store, T, ROWS, share=share)
    with pytest.raises(
        BadInput, match=r"the loss mask is empty: no document of .* within its first 1 tokens"
    ):
        batches.training(store, 1, ROWS)
    held = store_of(tmp_path, [document("a", 4)], settings=(0.999999999, 64))
    with pytest.raises(BadInput, match="holds no training documents"):
        batches.training(held, T, ROWS)
