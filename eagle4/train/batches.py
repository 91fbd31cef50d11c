"""Training batches: whole documents packed into rows, with grain, so that a stopped run goes on with the next batch.

Only document numbers travel through the pipeline; features are copied from the store when a batch is put together.
"""

from collections.abc import Iterator
from typing import NamedTuple

import grain
import ml_dtypes
import numpy as np
from grain.experimental import FirstFitPackIterDataset
from jaxtyping import BFloat16, Bool, Int32

from eagle4.errors import BadInput
from eagle4.train.features import FeatureStore, chance, read, split

BINS = 128  # rows open at once while packing
_AT_ONCE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Batch(NamedTuple):
    """B rows of T tokens. `segment` numbers a row's documents from 1 (0 = padding), `position` restarts in each.

    `document` is the number in the store, −1 in padding. Padding is 0 everywhere else.
    """

    tokens: Int32[np.ndarray, "B T"]
    supervised: Bool[np.ndarray, "B T"]
    features: BFloat16[np.ndarray, "B T A D"]
    hidden: BFloat16[np.ndarray, "B T D"]
    segment: Int32[np.ndarray, "B T"]
    position: Int32[np.ndarray, "B T"]
    document: Int32[np.ndarray, "B T"]


class Packing(NamedTuple):
    """One epoch: documents, tokens, the filled part of the rows, and the supervised part of the tokens."""

    documents: int
    tokens: int
    efficiency: float
    supervised: float


def training(
    store: FeatureStore, length: int, rows: int, seed: int = 0, share: float = 1.0, epochs: int | None = None
) -> grain.DatasetIterator[Batch]:
    """Batches of `rows` × `length` tokens, without end unless `epochs` is given; each epoch in another order.

    Documents are cropped at `length`; those whose answer begins later are not used. `share` keeps that part of the
    training documents. `get_state()` (plain JSON) and `set_state()` of the iterator save and restore its place.
    """
    chosen = _training_documents(store, length, share)
    return iter(_filled(store, _packed(store, chosen, length, seed, epochs), rows))


def held_out(store: FeatureStore, length: int, rows: int) -> Iterator[Batch]:
    """The held-out documents once, always in the same batches; no batch if none is held out."""
    chosen = _learnable(store, split(store)[1], length)
    if chosen:
        source = grain.MapDataset.source(_elements(store, chosen, length))
        yield from _filled(store, _pack(source, length, shuffle=False), rows)


def packing(store: FeatureStore, length: int, seed: int = 0, share: float = 1.0) -> Packing:
    """How well one epoch fills its rows; reads no features."""
    chosen = _training_documents(store, length, share)
    filled = [int((row["d_segment_ids"] > 0).sum()) for row in _packed(store, chosen, length, seed, 1)]
    supervised = sum(int(read(store, i).supervised[:length].sum()) for i in chosen)
    tokens = sum(filled)
    return Packing(len(chosen), tokens, tokens / (len(filled) * length), supervised / tokens)


def token_counts(store: FeatureStore, vocab_size: int, share: float = 1.0) -> np.ndarray:
    """How often each token is supervised in the training documents, [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for i in split(store, share)[0]:
        document = read(store, i)
        counts += np.bincount(document.tokens[document.supervised], minlength=vocab_size)
    return counts


def held_out_prompts(store: FeatureStore, number: int) -> list[list[int]]:
    """Token ids of the first `number` held-out documents up to their answers."""
    chosen = [read(store, i) for i in split(store)[1][:number]]
    return [d.tokens[: int(np.argmax(d.supervised))].tolist() for d in chosen]


def _training_documents(store: FeatureStore, length: int, share: float) -> list[int]:
    if not 0 < share <= 1:
        raise BadInput(f"share must lie in (0, 1], got {share}")
    chosen = split(store, share)[0]
    if not chosen:
        raise BadInput(
            f"{store.folder} holds no training documents (all are held out); capture more documents"
        )
    usable = _learnable(store, chosen, length)
    if not usable:
        raise BadInput(
            f"the loss mask is empty: no document of {store.folder} has an answer within its first {length} tokens; "
            "use longer rows"
        )
    return usable


def _learnable(store: FeatureStore, chosen: list[int], length: int) -> list[int]:
    return [i for i in chosen if read(store, i).supervised[:length].any()]


def _elements(store: FeatureStore, chosen: list[int], length: int) -> list[dict[str, np.ndarray]]:
    """What is packed: each document's number, once per token."""
    sizes = [min(length, len(read(store, i).tokens)) for i in chosen]
    return [{"d": np.full(n, i, np.int32)} for i, n in zip(chosen, sizes)]


def _packed(
    store: FeatureStore, chosen: list[int], length: int, seed: int, epochs: int | None
) -> grain.IterDataset[dict[str, np.ndarray]]:
    """Shuffled anew in each epoch. Rows may join the end of one epoch and the start of the next."""
    source = grain.MapDataset.source(_elements(store, chosen, length))
    # grain adds the epoch to the seed: drawn apart, the second epoch of one seed is not the first of the next.
    drawn = int(chance(str(seed), "shuffle") * (1 << 32))
    return _pack(source.shuffle(drawn).repeat(epochs), length, shuffle=True)


def _pack(
    elements: grain.MapDataset[dict[str, np.ndarray]], length: int, shuffle: bool
) -> grain.IterDataset[dict[str, np.ndarray]]:
    """Rows {d, d_segment_ids, d_positions}, each [T]. Without shuffling the rows, packing keeps long ones first."""
    return FirstFitPackIterDataset(
        elements.to_iter_dataset(_AT_ONCE),
        length_struct={"d": length},
        num_packing_bins=BINS,
        shuffle_bins=shuffle,
    )


def _filled(
    store: FeatureStore, packed: grain.IterDataset[dict[str, np.ndarray]], rows: int
) -> grain.IterDataset[Batch]:
    return packed.batch(rows).map(lambda row: _gather(store, row, rows))


def _gather(store: FeatureStore, packed: dict[str, np.ndarray], rows: int) -> Batch:
    """The batch of packed document numbers; missing rows at the end of the data are padding."""
    short = [(0, rows - len(packed["d"])), (0, 0)]
    numbers, segment, position = (np.pad(packed[k], short) for k in ("d", "d_segment_ids", "d_positions"))
    mark, shape = store.fingerprint, segment.shape
    tokens, supervised = np.zeros(shape, np.int32), np.zeros(shape, bool)
    features = np.zeros((*shape, len(mark.taps), mark.width), ml_dtypes.bfloat16)
    hidden = np.zeros((*shape, mark.width), ml_dtypes.bfloat16)
    for row, first in zip(*np.nonzero((segment > 0) & (position == 0))):
        n = int((segment[row] == segment[row, first]).sum())
        document, place = read(store, int(numbers[row, first])), (row, slice(first, first + n))
        tokens[place], supervised[place] = document.tokens[:n], document.supervised[:n]
        features[place], hidden[place] = document.features[:n], document.hidden[:n]
    document = np.where(segment > 0, numbers, -1)
    return Batch(tokens, supervised, features, hidden, segment, position, document)
