"""A figure of several runs takes its numbers from where they are, and says which one is missing."""

import json

import pytest

from eagle4.errors import BadInput
from experiments import plot_sweep


def run(folder, results=None, summary=None, config=None):
    folder.mkdir(parents=True)
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))
    if summary is not None:
        (folder / "metrics.jsonl").write_text('{"step": 0}\n' + json.dumps({"summary": summary}) + "\n")
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


def test_numbers_come_from_results_then_summary_then_config(tmp_path):
    one = run(tmp_path / "r", {"tau": 2.0}, {"tau": 1.0, "decode/tau": 3}, "train: {share: 0.5}\ntau: 9\n")
    assert [plot_sweep.figure(one, n) for n in ("tau", "decode/tau", "train.share")] == [2.0, 3.0, 0.5]
    with pytest.raises(BadInput, match="has no figure 'speed'"):
        plot_sweep.figure(one, "speed")


def test_a_sweep_stands_for_its_jobs_in_order(tmp_path):
    for number in (10, 2):
        run(tmp_path / "sweep" / f"{number}_x", {"tau": number, "tokens": number})
    assert [p.name for p in plot_sweep.runs([tmp_path / "sweep"])] == ["2_x", "10_x"]
    assert plot_sweep.main([str(tmp_path / "sweep"), "x=tokens", "y=tau"]) == 0
    assert (tmp_path / "sweep" / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name folders, x and y"),
        (["runs", "x=a", "y=b", "z=c"], "unknown option z"),
        (["none", "x=a", "y=b"], "none has no figure 'a'"),
    ],
)
def test_mistakes_cost_one_line(arguments, said, capsys):
    assert plot_sweep.main(arguments) == 2
    told = capsys.readouterr().err
    assert (told.count("\n"), said in told) == (1, True)
