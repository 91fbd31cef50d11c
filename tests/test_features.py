"""The feature store: what goes in comes out bit for bit, faults are named, and a failed write loses nothing else."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kit import TINY, tiny_params
from tiny_store import MARK, SETTINGS, document, store_of

from eagle4.errors import BadInput
from eagle4.specs import RopeSpec
from eagle4.train import features
from eagle4.train.features import Document, Fingerprint

FIRST = [document("a", 5), document("ü/b", 1)]
SECOND = [document("c", 7)]


def assert_same(found: Document, wanted: Document):
    assert found.name == wanted.name
    for a, b in zip(found[1:], wanted[1:]):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def assert_holds(folder: Path, *documents: Document):
    store = features.open_store(folder, MARK)
    assert features.size(store) == len(documents)
    for i, wanted in enumerate(documents):
        assert_same(features.read(store, i), wanted)
        assert store.name(i) == wanted.name


def test_documents_come_back_bit_for_bit(tmp_path):
    store = store_of(tmp_path, FIRST, SECOND)
    assert_holds(tmp_path, *FIRST, *SECOND)
    for i in (-1, 3):
        with pytest.raises(IndexError):
            features.read(store, i)
    # The files are plain: a bfloat16 is the upper half of a float32.
    raw = np.load(tmp_path / "features_00001.npy")
    wanted = np.asarray(SECOND[0].features, np.float32)
    assert ((raw.astype(np.uint32) << 16).view(np.float32) == wanted).all()
    assert np.load(tmp_path / "offsets_00000.npy").tolist() == [0, 5, 6]
    assert isinstance(features.read(store, 0).features.base, np.memmap)


def test_going_on_knows_what_is_done(tmp_path):
    assert features.start(tmp_path, MARK, *SETTINGS) == set()
    bad = document("bad", 3)
    bad.features[1, 1, 1] = np.nan
    assert features.append(tmp_path, [*FIRST, bad]) == ["bad"]
    assert features.start(tmp_path, MARK, *SETTINGS) == {"a", "ü/b", "bad"}
    features.append(tmp_path, SECOND)
    assert_holds(tmp_path, *FIRST, *SECOND)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["features", "hidden"])
def test_documents_that_are_not_finite_are_left_out_and_named(tmp_path, field, value):
    bad = document("bad", 4)
    getattr(bad, field)[3, ..., 0] = value
    features.start(tmp_path, MARK, *SETTINGS)
    assert features.append(tmp_path, [bad]) == ["bad"]
    with pytest.raises(BadInput, match="holds no documents yet"):
        features.open_store(tmp_path, MARK)
    largest = document("large", 2)
    largest.hidden[0, 0] = ml_dtypes.finfo(ml_dtypes.bfloat16).max
    assert features.append(tmp_path, [FIRST[0], bad, largest]) == ["bad"]
    assert_holds(tmp_path, FIRST[0], largest)


def test_an_empty_loss_mask_is_refused(tmp_path):
    features.start(tmp_path, MARK, *SETTINGS)
    silent = document("silent", 4)._replace(supervised=np.zeros(4, bool))
    with pytest.raises(BadInput, match="'silent' has an empty loss mask"):
        features.append(tmp_path, [FIRST[0], silent])
    assert [p.name for p in tmp_path.iterdir()] == ["index.json"]


OTHERS = {
    "model": "other",
    "spec": "x",
    "weights": "x",
    "taps": (0, 1),
    "width": 8,
    "dtype": "f",
    "layout": 2,
}


@pytest.mark.parametrize("key", Fingerprint._fields)
def test_another_targets_features_are_refused(tmp_path, key):
    store_of(tmp_path, FIRST)
    other = MARK._replace(**{key: OTHERS[key]})
    for opened in (
        lambda: features.open_store(tmp_path, other),
        lambda: features.start(tmp_path, other, 0.1, 9),
    ):
        with pytest.raises(BadInput, match=f"another target: {key} is .* there and .* here"):
            opened()


def test_documents_cut_or_split_in_another_way_are_refused(tmp_path):
    store_of(tmp_path, FIRST)
    with pytest.raises(BadInput, match=r"begun with held_out=0\.25, not 0\.5"):
        features.start(tmp_path, MARK, 0.5, 64)
    with pytest.raises(BadInput, match="begun with max_length=64, not 65"):
        features.start(tmp_path, MARK, 0.25, 65)


# ---- writes that fail


class Failing:
    """A file whose writes fail after some bytes."""

    def __init__(self, file, error):
        self.file, self.error = file, error

    def write(self, content):
        self.file.write(bytes(memoryview(content).cast("B")[:3]))
        raise self.error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def fail_at(monkeypatch, part: str, error: BaseException):
    """The first file whose name has `part` in it can't be written."""
    real = Path.open

    def opened(path, mode="r", *rest, **kw):
        file = real(path, mode, *rest, **kw)
        return Failing(file, error) if part in path.name and mode in ("wb", "xb") else file

    monkeypatch.setattr(Path, "open", opened)


FULL = OSError(errno.ENOSPC, "No space left on device")
PARTS = ["features_00001", "hidden_00001", "tokens_00001", "offsets_00001", "ids_00001", "index.json"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("error", "told"), [(FULL, BadInput), (KeyboardInterrupt(), KeyboardInterrupt)], ids=["full", "interrupt"]
)
def test_a_failed_write_loses_only_the_shard_under_way(tmp_path, monkeypatch, part, error, told):
    store_of(tmp_path, FIRST)
    with monkeypatch.context() as patch:
        fail_at(patch, part, error)
        with pytest.raises(told) as caught:
            features.append(tmp_path, SECOND)
    if told is BadInput:
        message = str(caught.value)
        assert "the disk is full; its 1 earlier shards are kept" in message
        assert "\n" not in message
        assert not list(tmp_path.glob("*_00001*"))
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".") or p.suffix == ".part"]
    assert_holds(tmp_path, *FIRST)
    assert features.start(tmp_path, MARK, *SETTINGS) == {"a", "ü/b"}
    features.append(tmp_path, SECOND)
    assert_holds(tmp_path, *FIRST, *SECOND)


def test_other_errors_of_the_disk_are_not_called_full(tmp_path, monkeypatch):
    store_of(tmp_path, FIRST)
    fail_at(monkeypatch, "hidden_00001", OSError(errno.EIO, "I/O error"))
    with pytest.raises(OSError, match="I/O error"):
        features.append(tmp_path, SECOND)


def test_a_write_that_was_killed_is_written_again(tmp_path):
    store_of(tmp_path, FIRST)
    (tmp_path / "features_00001.npy").write_bytes(b"half")
    (tmp_path / "hidden_00001.npy.part").write_bytes(b"half")
    assert_holds(tmp_path, *FIRST)
    features.append(tmp_path, SECOND)
    assert_holds(tmp_path, *FIRST, *SECOND)


# ---- damage


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path):
    path.write_bytes(path.read_bytes() + b"\0\0")


def reshape(path: Path):
    np.save(path, np.load(path)[:-1])


FILES = [f"{name}_00000.npy" for name in ("features", "hidden", "tokens", "supervised", "offsets")]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [cut, lengthen, reshape, Path.unlink, lambda p: p.write_bytes(b"")])
def test_a_damaged_shard_is_named(tmp_path, name, harm):
    store_of(tmp_path, FIRST)
    harm(tmp_path / name)
    with pytest.raises(BadInput, match=rf"{name} is missing or damaged \(.*\); remove the folder") as caught:
        features.open_store(tmp_path, MARK)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ['["a"]', '["a", 1]', "{", '{"a": 1}'])
def test_damaged_names_and_offsets_are_named(tmp_path, content):
    store_of(tmp_path, FIRST)
    (tmp_path / "ids_00000.json").write_text(content)
    with pytest.raises(BadInput, match=r"ids_00000\.json is missing or damaged"):
        features.open_store(tmp_path, MARK)
    store_of(tmp_path / "b", FIRST)
    np.save(tmp_path / "b" / "offsets_00000.npy", np.array([0, 6, 6]))
    with pytest.raises(BadInput, match=r"offsets_00000\.npy is missing or damaged"):
        features.open_store(tmp_path / "b", MARK)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "there is no feature store at"),
        ("{", r"index\.json is missing or damaged"),
        ("[]", "is not the index of a feature store"),
        ('{"fingerprint": {}}', "is not the index of a feature store"),
    ],
)
def test_a_folder_without_a_whole_index_is_refused(tmp_path, content, match):
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(BadInput, match=match):
        features.open_store(tmp_path, MARK)


# ---- fingerprint and split


def test_the_fingerprint_changes_with_target_and_taps_only():
    params = tiny_params()
    mark = features.fingerprint("m", TINY, params, (0, 1))
    assert mark[3:] == ((0, 1), 32, "bfloat16", features.LAYOUT)
    # Loaded in bfloat16 it is the same target.
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert features.fingerprint("m", TINY, rounded, (0, 1)) == mark
    tuned = params | {
        "layers": (*params["layers"][:-1], params["layers"][-1] | {"o": params["layers"][-1]["o"] * 2})
    }
    assert features.fingerprint("m", TINY, tuned, (0, 1)).weights != mark.weights
    assert features.fingerprint("m", TINY, params, (0, 2)).taps != mark.taps
    for other in (replace(TINY, num_heads=2), replace(TINY, rope=RopeSpec(theta=5.0))):
        assert features.fingerprint("m", other, params, (0, 1)).spec != mark.spec


def test_a_field_added_to_a_spec_leaves_its_digest():
    assert features._changed(replace(TINY, rope=RopeSpec(theta=5.0)))["rope"] == {"theta": 5.0}
    assert "windows" not in features._changed(TINY)
    assert "num_layers" in features._changed(TINY)


def test_chances_are_uniform_independent_and_the_same_everywhere():
    # printf order/a | b2sum -l 48
    assert features.chance("a", "order") == 0xC5A2F6511270 / 2**48
    x = np.array([features.chance(str(i), "order") for i in range(4000)])
    y = np.array([features.chance(str(i), "held out") for i in range(4000)])
    for chances in (x, y):
        assert 0 <= chances.min() <= chances.max() < 1
        assert (
            np.abs(np.sort(chances) - np.arange(4000) / 4000).max() < 0.03
        )  # Kolmogorov–Smirnov, far beyond 1 %
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.06


def test_the_split_depends_on_names_alone(tmp_path):
    documents = [document(f"d{i}", 2) for i in range(40)]
    few = store_of(tmp_path / "few", documents[:30])
    many = store_of(tmp_path / "many", documents[:7], documents[::-1][:-7])
    training, held = features.split(few)
    assert sorted(training + held) == list(range(30))
    assert 0 < len(held) < 15
    named = [{store.name(i) for i in features.split(store)[1]} for store in (few, many)]
    assert named[0] == {name for name in named[1] if int(name[1:]) < 30}
    order = [[store.name(i) for i in features.split(store)[0]] for store in (few, many)]
    assert order[0] == [name for name in order[1] if int(name[1:]) < 30]


def test_smaller_shares_lie_inside_larger_ones(tmp_path):
    store = store_of(tmp_path, [document(f"d{i}", 2) for i in range(40)])
    whole, held = features.split(store)
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        part, same = features.split(store, share)
        assert part == whole[: -(-len(whole) * int(share * 8) // 8)]
        assert same == held


def test_the_index_is_plain_json(tmp_path):
    store_of(tmp_path, FIRST, SECOND)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["shards"] == [{"documents": 2, "tokens": 6}, {"documents": 1, "tokens": 7}]
    assert index["fingerprint"]["taps"] == [0, 2]
