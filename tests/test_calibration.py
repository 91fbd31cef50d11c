"""Counts of recorded rounds: kept, read back strictly, and better than the drafter's own word on other rounds."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from eagle4 import calibration, report_reliability
from eagle4.errors import BadInput
from eagle4.harness import reliability as trust
from eagle4.types import RoundInfo


def recorded(rounds: int, seed: int, rate=lambda p: p * p) -> RoundInfo:
    """Chains of two guesses by a drafter that is too sure of itself: [R, 1] and [R, 1, 3]."""
    rng = np.random.default_rng(seed)
    step = rng.uniform(0.05, 1, (rounds, 2))
    score = np.concatenate([np.zeros((rounds, 1)), np.log(step).cumsum(1)], axis=1)[:, None]
    accepted = (rng.uniform(size=(rounds, 2)) < rate(step)).cumprod(1).sum(1)[:, None]
    depth = np.broadcast_to(np.arange(3), (rounds, 1, 3))
    one = np.ones((rounds, 1), np.int32)
    return RoundInfo(
        active=one.astype(bool),
        drafted_depth=2 * one,
        drafted_nodes=2 * one,
        verified_nodes=3 * one[:, 0],
        num_accepted=accepted,
        num_committed=accepted + 1,
        levels=2 * one[:, 0],
        score=np.where(depth > 0, score, -np.inf),
        depth=depth,
        taken=(depth > 0) & (depth <= accepted[..., None]),
        predicted_ms=np.nan * one[:, 0],
    )


def test_counts_are_those_of_the_rounds():
    info = recorded(300, 0)
    counts = calibration.counted([info, info], 2)
    assert float(counts.seen.sum()) == 4 * 300
    assert float(counts.accepted.sum()) == 2 * info.num_accepted.sum()
    np.testing.assert_allclose(counts.claimed.sum(), 2 * np.exp(info.score).sum(), rtol=1e-4)
    assert counts.tried.tolist() == [600, 2 * (info.num_accepted >= 1).sum()]
    assert counts.won.tolist() == [2 * (info.num_accepted >= k).sum() for k in (1, 2)]


def test_correction_helps_on_rounds_that_were_not_counted():
    taught = calibration.counted([recorded(2000, 0)], 2)
    error = calibration.judged(taught, [recorded(2000, 1)])
    assert min(error["before"]) > 0.08
    assert max(error["after"]) < 0.04


def test_a_file_holds_what_was_counted(tmp_path):
    counts = calibration.counted([recorded(2000, 0)], 2)
    calibration.save_reliability(tmp_path / "c.json", counts, {"method": "x"})
    spec = calibration.load_reliability(tmp_path / "c.json")
    hash(spec)
    for name in trust.Reliability._fields:
        np.testing.assert_allclose(getattr(spec, name), getattr(counts, name), atol=1e-3)
    start = trust.learned(spec, 4)
    rates = trust.corrected(trust.bias(start), jnp.log(jnp.array([0.55])), jnp.array([1]))
    assert abs(float(rates[0]) - 0.55**2) < 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(format="x"), "not of format"),
        (lambda c: c.pop("won"), "missing"),
        (lambda c: c.update(tried=[1.0, -2.0]), "tried must hold"),
        (lambda c: c.update(seen=[[1.0]]), "seen must hold"),
        (lambda c: c.update(won=[1e9, 0.0]), "more was accepted than seen"),
    ],
)
def test_a_file_that_cannot_be_counts_is_refused(tmp_path, change, said):
    path = tmp_path / "c.json"
    calibration.save_reliability(path, calibration.counted([recorded(50, 0)], 2), {})
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=said):
        calibration.load_reliability(path)


def test_no_file_or_no_json_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no calibration at"):
        calibration.load_reliability(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        calibration.load_reliability(tmp_path / "broken.json")


def test_the_plot_is_written_whole(tmp_path):
    counts = calibration.counted([recorded(500, 0)], 2)
    report_reliability.plot(counts, counts, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))
