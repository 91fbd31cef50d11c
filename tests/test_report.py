"""The printed table, the figure and summary.json say what the rows say."""

import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from eagle4 import files, report
from eagle4.metrics import Rounds
from eagle4.summary import Sample, summarise


def made_up_rows(
    methods=("ar", "prompt_lookup"), categories=("code", "math_reasoning"), identical=True, timed=True
):
    """Rows of a made-up benchmark: 4 prompts per category, method i drafting 3·i tokens a round."""
    rng = np.random.default_rng(0)
    samples = []
    for i, method in enumerate(methods):
        for j, category in enumerate(categories):
            for k in range(4):
                depth = np.full(20, 3 * i)
                accepted = rng.binomial(3 * i, 0.3 + 0.08 * j, 20)
                rounds = Rounds(depth, depth, depth + 1, accepted, accepted + 1)
                phases = {"draft_ms": 0.5 * i, "verify_ms": 30.0 + 2 * i, "commit_ms": 0.2} if timed else {}
                seconds = 20 * (0.03 + 0.004 * i) * rng.uniform(0.9, 1.1)
                tokens = int(rounds.num_committed.sum())
                common = {"prompt_tokens": 40, "prefill_s": 0.25, "identical": identical, "ties": int(i == 1)}
                prompt = f"{category}/{k}"
                samples.append(
                    Sample(
                        method,
                        prompt,
                        category,
                        tokens=tokens,
                        decode_s=seconds,
                        rounds=rounds,
                        **common,
                        **phases,
                    )
                )
    return summarise(samples, [s for s in samples if s.method == methods[0]])


def printed(rows, width=140) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    report.print_table(rows, console)
    return console.file.getvalue()


def line_of(text: str, *words: str) -> str:
    (line,) = [line for line in text.splitlines() if all(word in line.split() for word in words)]
    return line


def test_table_shows_speed_acceptance_interval_phases_and_identity():
    rows = made_up_rows()
    text = printed(rows)
    row = next(r for r in rows if (r.method, r.category) == ("prompt_lookup", "all"))
    cells = line_of(text.split("all")[1], "prompt_lookup").split()
    assert cells == [
        "prompt_lookup",
        f"{row.tokens_per_s:.1f}",
        f"{row.tau:.2f}",
        f"{row.speedup_vs_ar:.2f}×",
        f"{row.speedup_low:.2f}–{row.speedup_high:.2f}",
        f"{row.round_ms:.1f}",
        "0.5",
        "32.0",
        "0.2",
        "250",
        "✓",
        "8",
        "ties",
    ]
    assert text.count("prompt_lookup") == 3
    assert "without prefill" in text


def test_table_never_hides_a_difference_or_an_unmeasured_value():
    assert "✗ DIFFERS" in printed(made_up_rows(identical=False))
    text = printed(made_up_rows(identical=None, timed=False))
    assert "✓" not in text
    assert "n/a" in text
    assert "verify" not in text
    assert "nan" not in text


def test_table_fits_a_narrow_terminal_without_losing_numbers():
    rows = made_up_rows()
    assert "…" in printed(rows, width=40)
    for width in (80, 100):
        text = printed(rows, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


def test_summary_is_strict_json_with_the_names_of_the_rows(tmp_path):
    rows = made_up_rows()
    path = tmp_path / "deep" / "summary.json"
    report.write_summary(rows, path)
    loaded = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in summary.json"))
    assert [(r["method"], r["category"]) for r in loaded] == [(r.method, r.category) for r in rows]
    for name in ("tau", "tau_commit", "tau_per_request", "joint", "speedup_low", "greedy_identical", "ties"):
        assert [r[name] for r in loaded] == [getattr(r, name) for r in rows]
    assert list(path.parent.iterdir()) == [path]


def test_plain_values_have_no_nan_and_no_arrays():
    value = {
        "a": np.float32(0.5),
        "b": [np.nan, math.inf, np.int32(3)],
        "c": np.array([[1.0, np.nan]]),
        4: (True, None),
    }
    assert files.plain(value) == {"a": 0.5, "b": [None, None, 3], "c": [[1.0, None]], "4": [True, None]}
    assert json.dumps(files.plain(value), allow_nan=False)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "x.json"
    files.write_atomic(path, "old")
    with pytest.raises(TypeError):
        files.write_atomic(path, 3)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("methods", [("ar",), ("ar", "a", "b", "c", "d")])
@pytest.mark.parametrize("categories", [("code",), tuple("abcdefgh")])
def test_figure_has_a_bar_for_every_method_and_category(tmp_path, monkeypatch, methods, categories):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    rows = made_up_rows(methods, categories)
    report.plot_summary(rows, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").read_bytes()[:4] == b"\x89PNG"
    speed, accepted = drawn[0].axes
    shown = categories if len(categories) == 1 else (*categories, "all")
    for i, method in enumerate(methods):
        by_category = {r.category: r for r in rows if r.method == method}
        assert [bar.get_height() for bar in speed.containers[i]] == [
            by_category[c].tokens_per_s for c in shown
        ]
        assert [bar.get_height() for bar in accepted.containers[i]] == [by_category[c].tau for c in shown]
        assert speed.containers[i].get_label() == method


def test_importing_does_not_pull_in_heavy_packages():
    code = (
        "import sys, eagle4, eagle4.conf, eagle4.metrics, eagle4.report, eagle4.tracking\n"
        "print([m for m in ('torch', 'wandb', 'matplotlib', 'transformers', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
