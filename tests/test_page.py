"""The page says what the folders say: figures against sums done by hand, nothing hidden, nothing loaded."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from omegaconf import OmegaConf

from eagle4 import page, report
from eagle4.errors import BadInput
from eagle4.metrics import Rounds
from eagle4.page_cost import label_sides, pareto
from eagle4.runs import labels, read_run, read_runs
from eagle4.summary import Sample, summarise
from eagle4.tracking import write_status
from eagle4.tree.draw import svg
from experiments import benchmark
from experiments import report as app

CONFIG = {
    "model": {"_target_": "eagle4.run_specs.ModelSource", "source": "tiny==1", "dtype": "float32"},
    "data": {"path": None, "limit": 2, "max_new_tokens": 9},
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "tree": {"depth": 2, "nodes": 4},
    "policy": {"name": "marginal"},
    "tracking": {"wandb": "disabled"},
    "name": "eagle4",
    "verifier": "point_mass",
}
ODD = "odd </script><b> id"  # a prompt id that would end a script element
# Accepted drafts and levels of two answers, 4 + 2 rounds. The last round's own token does not fit any more.
ACCEPTED = {"p1": ([2, 0, 1, 2], [2, 2, 2, 2]), ODD: ([0, 1], [2, 1])}
# J_1 = #(a ≥ 1)/#(n ≥ 1) = 4/6, J_2 = 2/5; C_1 = 4/6, C_2 = #(a ≥ 2)/#(a ≥ 1, n ≥ 2) = 2/3.
JOINT, CONDITIONAL, TAU = [4 / 6, 2 / 5], [4 / 6, 2 / 3], 12 / 6


def samples(identical=True, ties=0, timed=True, priced=True):
    """Plain decoding at 100 ms a token; a drafting method at 150 ms a round, priced at 120 and at 200 ms."""
    same = None if identical is None else True
    found = []
    for i, (prompt, (accepted, depth)) in enumerate(ACCEPTED.items()):
        a, n = np.array(accepted), np.array(depth)
        committed = a + 1
        committed[-1] -= i
        tokens = int(committed.sum())
        one, zero = np.ones(tokens, int), np.zeros(tokens, int)
        common = {"prompt_id": prompt, "category": ("code", "chat")[i], "prompt_tokens": 5, "prefill_s": 0.5}
        plain = Rounds(zero, zero, one, zero, one)
        drafted = Rounds(n, n + 1, n + 2, a, committed)
        phases = {"draft_ms": 10.0 + i, "verify_ms": 40.0, "commit_ms": 1.0} if timed else {}
        told = {"predicted_ms": np.full(len(a), (120.0, 200.0)[i])} if priced else {}
        found.append(
            Sample("ar", tokens=tokens, decode_s=0.1 * tokens, rounds=plain, identical=same, **common)
        )
        own = {
            "identical": same and (identical or i == 0),
            "ties": ties,
            **phases,
            **told,
        }
        found.append(Sample("eagle4", tokens=tokens, decode_s=0.15 * len(a), rounds=drafted, **own, **common))
    return found


def folder(path, state="finished", error=None, config=None, given=None, kind="benchmark", **kinds):
    """A run folder of a benchmark, its files written by what writes them there; without `given`, no results."""
    path.mkdir(parents=True)
    write_status(path, "running")
    write_status(path, state, error)
    config = CONFIG | (config or {})
    (path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    job = {"kind": kind, "name": path.name, "group": None, "overrides": kinds.get("overrides", [])}
    environment = {
        "time": "2026-01-02T03:04:05+00:00",
        "command": [f"/x/{kind}.py", "method=eagle4", "a=[1,2]"],
    }
    environment |= {"job": job, "git": {"commit": "c0ffee0123456789", "dirty": True}}
    environment |= {"device": {"platform": "cpu", "cpu_model": "Abacus", "cores": 2, "jax": "1.2"}}
    (path / "environment.json").write_text(json.dumps(environment))
    if given:
        rows = summarise(given, [s for s in given if s.method == "ar"])
        report.write_summary(rows, path / "summary.json")
        benchmark.write_rounds(path / "rounds.jsonl", given)
        lines = [json.dumps({"step": i, **benchmark.record(s)}) for i, s in enumerate(given)]
        (path / "metrics.jsonl").write_text("\n".join([*lines, '{"summary": {}}']) + "\n")
    return path


class Parsed(HTMLParser):
    """Figures (their JSON by id), tables (rows of texts), links, scripts, and all text that a reader sees."""

    def __init__(self, source):
        super().__init__()
        self.figures, self.tables, self.links, self.scripts, self.captions = {}, [], [], [], {}
        self.open, self.seen, self.figure = [], [], ""
        self.feed(source)
        self.text = " ".join(" ".join(self.seen).split())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.links += [
            value for key, value in attrs if key in ("src", "href", "srcset", "action", "data", "poster")
        ]
        self.figure = given.get("id", self.figure) if tag == "figure" else self.figure
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "link"):
            self.open.append((tag, given.get("type")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"<{tag}> is closed but not open"

    def handle_data(self, data):
        tag, kind = self.open[-1] if self.open else ("", None)
        if tag == "script" and kind == "application/json":
            self.figures[self.figure] = json.loads(data)
        elif tag == "script":
            self.scripts.append(data)
        elif tag != "style":
            self.seen.append(data)
            inside = [name for name, _ in self.open]
            if {"td", "th"} & set(inside):
                self.tables[-1][-1][-1] += f" {data}"
            if tag == "figcaption":
                self.captions[self.figure] = data

    def table(self, *head):
        """The body of the table with this head, words cut at single blanks."""
        found = [[[" ".join(cell.split()) for cell in row] for row in t] for t in self.tables]
        return next(t[1:] for t in found if t[0] == list(head))

    def traces(self, figure, choice=""):
        return {trace["name"]: trace for trace in self.figures[figure]["data"][choice]}


def shown(*paths):
    return Parsed(page.render(read_runs(paths)))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A finished run, its page parsed and its page as text."""
    path = folder(tmp_path_factory.mktemp("one") / "run", given=samples(ties=1))
    source = page.render(read_runs([path]))
    return Parsed(source), source


def test_acceptance_by_position_is_the_hand_computed_one(one):
    figure = one[0].figures["acceptance"]["data"]["0"]
    assert [(t["name"], t["x"], t["xaxis"]) for t in figure] == [
        ("eagle4", [1, 2], "x"),
        ("eagle4", [1, 2], "x2"),
    ]
    assert figure[0]["y"] == pytest.approx(JOINT)
    assert figure[1]["y"] == pytest.approx(CONDITIONAL)
    chat = one[0].figures["acceptance"]["data"]["2"]
    # a = [0, 1], n = [2, 1]: J = 1/2, 0/1; nobody reached the second place with a first one accepted.
    assert [t["y"] for t in chat] == [[0.5, 0.0], [0.5, None]]
    assert one[0].traces("lengths")["eagle4"]["x"] == ["all", "code", "chat"]
    assert one[0].traces("lengths")["eagle4"]["y"] == pytest.approx([TAU, 9 / 4, 3 / 2])


def test_the_comparison_says_speed_length_and_tokens_per_second(one):
    plain, eagle = one[0].table("method", "all prompts", "code", "chat")
    assert plain == ["ar", *["1.00× τ 1.00 10.0 tok/s"] * 3]
    # 11 tokens in 0.9 s against 1.1 s; by category 9 in 0.6 s and 2 in 0.3 s. Resamples lie between those two.
    assert eagle == [
        "eagle4",
        "1.22× τ 2.00 12.2 tok/s 0.67–1.50",
        "1.50× τ 2.25 15.0 tok/s",
        "0.67× τ 1.50 6.7 tok/s",
    ]


def test_phases_predictions_and_decisions_are_those_of_the_folder(one):
    phases = one[0].traces("phases")
    assert [phases[name]["y"] for name in ("draft", "verify", "commit")] == [["eagle4"]] * 3
    # Means per round: 4 rounds at 10 ms and 2 at 11.
    assert phases["draft"]["x"][0] == pytest.approx((4 * 10 + 2 * 11) / 6)
    assert (phases["verify"]["x"][0], phases["commit"]["x"][0]) == pytest.approx((40.0, 1.0))
    priced = one[0].traces("predictions")["eagle4"]
    assert priced["text"] == ["p1", ODD]
    assert (priced["x"], priced["y"]) == (pytest.approx([120, 200]), pytest.approx([150, 150]))
    heads = ("method", "answers", "predicted ms", "measured ms", "measured over predicted")
    priced_row = [row for row in one[0].table(*heads) if row[0] == "eagle4"]
    assert priced_row == [["eagle4", "2", "160.0", "150.0", "-6%"]]
    first = one[0].traces("decisions", "0/0")
    assert first["drafted depth"]["y"] == [2, 2, 2, 2]
    assert first["verified nodes, root included"]["y"] == [4, 4, 4, 4]
    assert (first["accepted"]["x"], first["accepted"]["y"]) == ([1, 2, 3, 4], [2, 0, 1, 2])
    assert one[0].traces("decisions", "0/1")["drafted depth"]["y"] == [2, 1]


def test_what_was_run_and_how_is_said(one):
    text = one[0].text
    for words in (
        "tiny==1 in float32",
        "Abacus, 2 cores",
        "c0ffee012345, with uncommitted changes",
        "2026-01-02 03:04 UTC",
        "python -m experiments.benchmark method=eagle4 'a=[1,2]'",
        "prefill and compilation are not in them",
        "target's own token included",
        "identical to plain decoding's on 2 of 2 prompts, 2 ties",
    ):
        assert words in text


def test_the_page_is_whole_and_loads_nothing(one):
    parsed, source = one
    assert parsed.open == []
    assert parsed.links == ["data:,"]
    library, own = parsed.scripts
    assert ("plotly.js v" in library[:200], own) == (True, page._SCRIPT)
    assert "default-src 'none'" in source
    assert "@import" not in page._STYLE + page._SCRIPT
    assert "url(" not in page._STYLE + page._SCRIPT
    assert ODD in parsed.text


@pytest.mark.parametrize(
    ("plane", "front"),
    [
        ([], []),
        ([(1.0, 1.0)], [0]),
        ([(1.0, 1.0), (0.8, 2.0)], [1]),  # cheaper and longer
        ([(0.5, 1.5), (1.0, 2.0), (0.9, 1.4), (1.2, 2.0), (2.0, 3.0)], [0, 1, 4]),
        ([(1.0, 2.0), (1.0, 3.0), (1.0, 3.0)], [1]),  # equal cost: the longer one, once
    ],
)
def test_pareto_front(plane, front):
    assert pareto(plane) == front


def test_names_of_points_that_are_close_stand_on_different_sides():
    # Of the two at 0.8 the lower one gives way; the one at 2.4 is alone.
    sides = label_sides([(0.80, 1.90), (0.82, 1.88), (2.40, 1.90)])
    assert list(sides.values()) == ["top center", "bottom center", "top center"]
    assert label_sides([(0.5, 2.0)]) == {(0.5, 2.0): "top center"}


def replayed(name, kind, speedup, tau, batch=1, **settings):
    costs = {
        "rounds": 3,
        "tokens": 9,
        "first_ms": 1.0,
        "steps_ms": 2.0,
        "verify_ms": 9.0,
        "levels": 1.5,
        "rows": 4.0,
    }
    own = {"name": name, "kind": kind, "settings": settings, "batch": batch, "tau": tau, "speedup": speedup}
    return own | {"ms_per_token": 10 / speedup} | costs


def test_length_against_cost_holds_measured_and_replayed_points_and_their_fronts(tmp_path):
    run = folder(tmp_path / "run", given=samples())
    points = [replayed(f"m{i}", "policy", 1 + i / 10, 2.0, depth=i) for i in range(12)]
    points += [replayed("f", "fixed", 1.25, 4.0), replayed("oracle", "oracle", 9.0, 5.0)]
    replay = folder(tmp_path / "replay", kind="replay")
    (replay / "replay.json").write_text(json.dumps(points))
    parsed = shown(run, replay)
    traces = parsed.traces("cost")
    assert (traces["measured"]["x"], traces["measured"]["y"]) == (
        pytest.approx([0.9 / 1.1]),
        pytest.approx([TAU]),
    )
    symbols = {
        kind: traces[f"replayed: {kind}"]["marker"]["symbol"] for kind in ("policy", "fixed", "oracle")
    }
    assert len({traces["measured"]["marker"]["symbol"], *symbols.values()}) == 4
    assert (traces["front, measured"]["x"], traces["front, measured"]["y"]) == (
        pytest.approx([0.9 / 1.1]),
        [TAU],
    )
    # The fastest of τ 2 and the longest; the oracle would beat both and is no choice.
    assert traces["front, replayed"]["x"] == pytest.approx([1 / 2.1, 1 / 1.25])
    assert traces["front, replayed"]["y"] == [2.0, 4.0]
    best = parsed.table("name", "kind", "settings", "batch", "speed-up", "τ", "ms a token")
    assert len(best) == 10
    assert best[0] == ["m11 · replay", "policy", "depth=11", "1", "2.10×", "2.00", "4.8"]
    assert [row[4] for row in best] == sorted((row[4] for row in best), reverse=True)
    assert "reaches 9.00× at batch 1" in parsed.text


def test_a_replayed_setting_that_names_no_batch_is_of_one_request(tmp_path):
    replay = folder(tmp_path / "replay", kind="replay")
    point = {key: value for key, value in replayed("m", "policy", 1.5, 2.0).items() if key != "batch"}
    (replay / "replay.json").write_text(json.dumps([point]))
    best = shown(replay).table("name", "kind", "settings", "batch", "speed-up", "τ", "ms a token")
    assert best == [["m", "policy", "as configured", "1", "1.50×", "2.00", "6.7"]]
    (replay / "replay.json").write_text(json.dumps([point | {"batch": "four"}]))
    with pytest.raises(BadInput, match="entry 1, has 'four' as 'batch'"):
        read_run(replay)


def test_a_load_run_shows_speed_levels_and_nodes_by_batch(tmp_path):
    run = folder(tmp_path / "load", kind="load")
    rows = [
        {"batch": b, "method": m, "tokens_per_s": 10.0 * b * s, "tau": t, "levels": 2.0 / b, "nodes": 8.0 / b}
        | {"round_ms": 100.0, "predicted_ms": None, "speedup_vs_ar": s, "identical": True}
        for b in (1, 4)
        for m, s, t in (("ar", 1.0, 1.0), ("eagle4", 2.0 - b / 4, 1.5))
    ]
    (run / "load.json").write_text(json.dumps(rows))
    parsed = shown(run)
    panels = [(t["x"], t["y"]) for t in parsed.figures["load"]["data"][""]]
    assert panels == [([1, 4], [1.75, 1.0]), ([1, 4], [2.0, 0.5]), ([1, 4], [8.0, 2.0])]
    points = parsed.traces("cost")
    assert points["measured, batch 4"]["x"] == [1.0]
    assert points["measured, batch 1"]["x"] == pytest.approx([1 / 1.75])
    heads = (
        "method",
        "batch",
        "tok/s",
        "speed-up",
        "τ",
        "levels",
        "nodes",
        "round ms",
        "predicted ms",
        "same ids",
    )
    assert parsed.table(*heads)[1] == [
        "eagle4",
        "1",
        "17.5",
        "1.75×",
        "1.50",
        "2.00",
        "8.00",
        "100.0",
        "–",
        "yes",
    ]
    assert "Methods by category: no benchmark results" in parsed.text
    assert "plain decoding's of the same batch in 2 of 2 cases" in parsed.text
    (run / "load.json").write_text(json.dumps([*rows[:3], rows[3] | {"identical": False}]))
    assert "in 1 of 2 cases" in shown(run).text


def test_drawn_trees_are_taken_over(tmp_path):
    run = folder(tmp_path / "draw", kind="draw", config={"prompt": "Say <b>."})
    tree = svg([-1, 0, 0], ["a", "b <i>", "c"], path=[1])
    (run / "rounds.html").write_text(f"<!doctype html>\n<h3>round 1: 1 accepted</h3>{tree}\n")
    parsed = shown(run)
    assert ("svg", None) not in parsed.open
    for words in ("round 1: 1 accepted", "b·<i>", "Say <b>."):
        assert words in parsed.text
    assert "Drawn trees: none" not in parsed.text


def test_every_figure_is_plotly_s_with_titled_axes_and_a_caption(one):
    assert {"acceptance", "lengths", "cost", "phases", "predictions", "decisions"} == set(one[0].figures)
    for name, figure in one[0].figures.items():
        for traces in figure["data"].values():
            go.Figure(
                {"data": traces, "layout": figure["layout"]}
            )  # raises for a name that Plotly does not know
        axes = [axis for key, axis in figure["layout"].items() if key[:5] in ("xaxis", "yaxis")]
        titles = [axis["title"]["text"] for axis in axes]
        assert all(titles), name
        assert len(one[0].captions[name]) > 20


def test_what_was_not_measured_is_named_and_left_out(tmp_path):
    sampling = {"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0}}
    given = [s._replace(identical=None) for s in samples(timed=False, priced=False)]
    parsed = shown(folder(tmp_path / "run", config=sampling, given=given))
    assert {"phases", "predictions", "load"} & set(parsed.figures) == set()
    for line in (
        "no phases were timed",
        "no rounds were priced",
        "no run of batches",
        "none in these folders",
    ):
        assert parsed.text.count(line) == 1
    assert "Drawn at temperature 0.7, top_p 0.9" in parsed.text
    assert "point_mass" in parsed.text
    assert "identical to plain decoding's" not in parsed.text


def test_ids_that_differ_are_not_hidden(tmp_path):
    parsed = shown(folder(tmp_path / "run", given=samples(identical=False)))
    assert "eagle4 DIFFERS from plain decoding: ids identical on 1 of 2 prompts." in parsed.text
    (row,) = [row for row in parsed.table("method", "all prompts", "code", "chat") if row[0] == "eagle4"]
    assert ["DIFFERS" in cell for cell in row[1:]] == [True, False, True]


def test_ids_that_nobody_compared_are_not_said_to_differ(tmp_path):
    given = [s._replace(identical=None) for s in samples()]
    parsed = shown(folder(tmp_path / "run", given=given))
    assert "The ids of eagle4 were not compared with plain decoding's." in " ".join(parsed.text.split())
    assert "DIFFERS" not in parsed.text
    # The rows alone say it too, when metrics.jsonl is lost: 1 of the 2 prompts has other ids.
    run = folder(tmp_path / "rows", given=samples(identical=False))
    (run / "metrics.jsonl").unlink()
    assert "eagle4 DIFFERS from plain decoding: ids identical on 1 of 2 prompts." in shown(run).text


@pytest.mark.parametrize(
    ("state", "error", "given", "said"),
    [
        ("failed", ValueError("boom\nmore"), None, "failed ValueError: boom"),
        ("failed", BadInput("no <such> tree"), samples(), "failed BadInput: no <such> tree"),
        (
            "interrupted",
            "KeyboardInterrupt",
            samples(),
            "interrupted 2 prompts were measured before it ended",
        ),
        ("running", None, None, "unfinished: still running, or killed"),
    ],
)
def test_a_run_that_did_not_end_well_is_shown_as_such(tmp_path, state, error, given, said):
    good = folder(tmp_path / "sweep" / "0_good", given=samples())
    folder(tmp_path / "sweep" / "1_bad", state, error, given=given, config={"tree": {"depth": 3, "nodes": 4}})
    parsed = shown(tmp_path / "sweep")
    assert f"depth=3: {said}" in parsed.text
    assert said not in shown(good).text


def test_a_job_that_left_only_hydra_s_own_files_is_shown_too(tmp_path):
    folder(tmp_path / "sweep" / "0_good", given=samples())
    own = tmp_path / "sweep" / "1_lost" / ".hydra"
    own.mkdir(parents=True)
    (own / "hydra.yaml").write_text("hydra: {job: {config_name: benchmark}}\n")
    (own / "config.yaml").write_text("tree: {depth: 7, nodes: 4}\n")
    for given in (tmp_path / "sweep", own.parent):
        assert "unfinished: it left no status" in shown(given).text


def test_a_job_that_broke_off_before_it_said_what_it_was_is_not_hidden(tmp_path):
    folder(tmp_path / "sweep" / "0_good", given=samples())
    lost = tmp_path / "sweep" / "1_lost"
    lost.mkdir()
    write_status(lost, "failed", BadInput("no such method"))
    assert "failed BadInput: no such method" in shown(tmp_path / "sweep").text
    assert "failed BadInput: no such method" in shown(lost).text


def test_folders_are_told_apart_by_what_differs(tmp_path):
    for i, depth in ((10, 4), (2, 3)):
        own = {"tree": {"depth": depth, "nodes": 4}, "tracking": {"wandb": f"{i}"}}
        folder(tmp_path / "sweep" / f"{i}_job", config=own, given=samples())
    folder(tmp_path / "sweep" / "3_train", kind="train")
    runs = read_runs([tmp_path / "sweep", tmp_path / "sweep" / "2_job"])
    assert [run.path.name for run in runs] == ["2_job", "10_job"]
    assert labels(runs) == [("depth=3",), ("depth=4",)]
    assert labels(runs[:1]) == [()]
    assert labels([runs[0], read_run(tmp_path / "sweep" / "2_job")._replace(path=Path("x"))]) == [
        ("2_job",),
        ("x",),
    ]
    parsed = Parsed(page.render(runs))
    assert list(parsed.traces("lengths")) == ["eagle4 · depth=3", "eagle4 · depth=4"]
    assert parsed.table("key", "depth=3", "depth=4") == [["tree.depth", "3", "4"]]


def test_what_follows_a_method_s_name_is_not_repeated(tmp_path):
    one = folder(tmp_path / "a", config={"name": "x", "tree": {"depth": 1, "nodes": 2}})
    two = folder(tmp_path / "b", config={"name": "y", "tree": {"depth": 3, "nodes": 2}})
    assert labels(read_runs([one, two])) == [("x",), ("y",)]
    typed = folder(
        tmp_path / "c", config={"name": "y", "tree": {"depth": 9, "nodes": 2}}, overrides=["tree.depth=9"]
    )
    assert labels(read_runs([one, typed])) == [("x", "depth=1"), ("y", "depth=9")]


def test_after_two_differences_only_those_that_tell_more_apart_are_said(tmp_path):
    given = [(1, 1, 1, "p"), (2, 2, 2, "p"), (2, 2, 2, "q")]  # the third follows the first two
    for i, values in enumerate(given):
        folder(tmp_path / f"{i}", config=dict(zip(("a", "b", "c", "d"), values)))
    runs = read_runs([tmp_path / f"{i}" for i in range(3)])
    assert labels(runs) == [("a=1", "b=1", "d=p"), ("a=2", "b=2", "d=p"), ("a=2", "b=2", "d=q")]
    assert labels(runs[:2]) == [("a=1", "b=1"), ("a=2", "b=2")]


def spoil(path, name, content):
    (path / name).write_bytes(content) if isinstance(content, bytes) else (path / name).write_text(content)
    return [path]


def line_of(path, name, number, content):
    lines = (path / name).read_text().splitlines()
    lines[number - 1] = content
    return spoil(path, name, "\n".join(lines))


BAD = {
    "no such folder": (lambda p: [p / "nope"], ("nope does not exist", "run folders")),
    "a file": (lambda p: [p / "status.json"], ("status.json is a file, not a folder",)),
    "an empty folder": (lambda p: [(p / "empty", (p / "empty").mkdir())[0]], ("empty holds no run", "benchmark")),
    "another experiment": (
        lambda p: [folder(p / "other", kind="train")],
        ("other holds only runs of train", "benchmark, load, replay, draw"),
    ),
    "a cut line": (lambda p: line_of(p, "rounds.jsonl", 3, '{"method": "a'), ("rounds.jsonl, line 3", "delete")),
    "a bare value": (lambda p: line_of(p, "metrics.jsonl", 2, "7"), ("metrics.jsonl, line 2", "no", "delete")),
    "a lacking key": (
        lambda p: line_of(p, "metrics.jsonl", 1, '{"prompt_id": "a", "method": "m"}'),
        ("metrics.jsonl, line 1", "lacks 'decode/time_s'"),
    ),
    "a text for a count": (
        lambda p: line_of(p, "rounds.jsonl", 1, '{"method": "m", "prompt_id": "a", "round": "x"}'),
        ("rounds.jsonl, line 1", "'x' as 'round'"),
    ),
    "a cut summary": (lambda p: spoil(p, "summary.json", "[{"), ("summary.json is not JSON", "again")),
    "a summary of something else": (lambda p: spoil(p, "summary.json", "{}"), ("summary.json should hold a list",)),
    "a row without its method": (lambda p: spoil(p, "summary.json", "[{}]"), ("entry 1", "lacks 'method'")),
    "a rate that is a text": (
        lambda p: spoil(p, "summary.json", '[{"method": "m", "category": "all", "prompts": 1, "joint": ["x"]}]'),
        ("summary.json, entry 1", "rates"),
    ),
    "a replay without costs": (
        lambda p: spoil(p, "replay.json", '[{"name": "m", "kind": "fixed", "settings": {}, "batch": 1}]'),
        ("replay.json, entry 1", "lacks 'tau'"),
    ),
    "a load of texts": (
        lambda p: spoil(p, "load.json", '[{"batch": "1"}]'),
        ("load.json, entry 1", "'1' as 'batch'"),
    ),
    "bytes that are no text": (lambda p: spoil(p, "rounds.jsonl", b"\xff\xfe{"), ("rounds.jsonl can't be read",)),
    "a config that is no YAML": (lambda p: spoil(p, "config.yaml", "a: [1"), ("config.yaml is not YAML",)),
    "no folder": (lambda p: [], ("no run folder given", "python -m experiments.report")),
    "out twice": (lambda p: [p, "out=a.html", "out=b.html"], ("out is given 2 times",)),
    "out that is no page": (lambda p: [p, "out=page.pdf"], ("page.pdf", ".html")),
    "out below a file": (lambda p: [p, f"out={p}/status.json/page.html"], ("page.html can't be written",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_costs_one_line_that_names_it(tmp_path, case):
    make, words = BAD[case]
    arguments = [str(a) for a in make(folder(tmp_path / "run", given=samples()))]
    with pytest.raises(BadInput) as caught:
        app.main(arguments)
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_the_command_writes_a_page_and_fails_with_one_line(tmp_path):
    run = folder(tmp_path / "a run=1", given=samples())
    command = [sys.executable, "-m", "experiments.report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(run / "page.html"), "")
    assert Parsed((run / "page.html").read_text()).figures.keys() >= {"cost", "acceptance"}
    done = subprocess.run([*command, str(tmp_path / "nope")], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
