"""Feature stores of random documents."""

from pathlib import Path

import ml_dtypes
import numpy as np

from eagle4.train import features
from eagle4.train.features import Document, Fingerprint

MARK = Fingerprint("model", "spec", "weights", (0, 2), 4)
SETTINGS = (0.25, 64)


def document(name: str, n: int, mark: Fingerprint = MARK) -> Document:
    rng = np.random.default_rng([n, *name.encode()])

    def floats(*shape):
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    tokens = rng.integers(0, 1 << 17, n).astype(np.int32)
    supervised = np.arange(n) >= n // 2
    return Document(name, tokens, supervised, floats(n, len(mark.taps), mark.width), floats(n, mark.width))


def store_of(folder: Path, *shards: list[Document], mark: Fingerprint = MARK, settings=SETTINGS):
    features.start(folder, mark, *settings)
    for shard in shards:
        features.append(folder, shard)
    return features.open_store(folder, mark)
