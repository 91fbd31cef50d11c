"""The reduced vocabulary of a drafter's head: which target id each of its rows stands for.

Inside these are the target's ids, increasing. Published checkpoints hold `d2t` [Vd], the *offset* from a row to its
target id, and `t2d` [V], true at the ids that have a row.
"""

import numpy as np

from eagle4.errors import BadInput


def to_ids(d2t: np.ndarray, t2d: np.ndarray, where: str) -> np.ndarray:
    """The target ids [Vd] int32 of a published map. Raises BadInput if it is not one that can be meant."""
    if d2t.dtype.kind not in "iu" or t2d.dtype.kind not in "iub":
        raise BadInput(
            f"{where}: d2t must hold integers and t2d truth values, not {d2t.dtype} and {t2d.dtype}"
        )
    rows, V = np.arange(len(d2t), dtype=np.int64), len(t2d)
    offset, has_row = d2t.astype(np.int64), t2d.astype(bool)
    ids = rows + offset
    if len(rows) > 1 and np.array_equal(offset, rows):
        raise BadInput(
            f"{where}: d2t counts 0, 1, 2, …: the map was never filled in; export the drafter again"
        )
    sound = bool(np.all(np.diff(ids) > 0)) and ids[0] >= 0 and ids[-1] < V
    if sound and np.array_equal(np.flatnonzero(has_row), ids):
        return ids.astype(np.int32)
    if np.array_equal(np.flatnonzero(has_row), offset):
        raise BadInput(f"{where}: d2t holds target ids; it must hold offsets, target id − draft id")
    if not sound:
        raise BadInput(f"{where}: d2t + 0, 1, 2, … must be increasing ids below {V}")
    raise BadInput(
        f"{where}: t2d marks {int(has_row.sum())} ids, which are not the {len(ids)} that d2t leads to; "
        "export the drafter again"
    )


def to_published(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t` and `t2d` of increasing target ids."""
    ids = np.asarray(ids, np.int64)
    if not (len(ids) and np.all(np.diff(ids) > 0) and ids[0] >= 0 and ids[-1] < vocab_size):
        raise BadInput(f"draft_ids must be increasing ids below {vocab_size}")
    t2d = np.zeros(vocab_size, bool)
    t2d[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": t2d}
