"""One HTML page that shows runs: self-contained, opened offline, and forbidden by its own policy to load anything.

Figures are Plotly's JSON beside one inlined copy of its script. What a run did not measure is left out and named.
"""

import json
from collections.abc import Callable, Sequence
from html import escape

from eagle4 import page_cost, page_plots, page_tables
from eagle4.errors import BadInput
from eagle4.files import plain
from eagle4.page_figure import Named, Plot
from eagle4.runs import RunFolder, labels
from eagle4.summary import RESAMPLES

TREES = 40  # drawn rounds of one run that a page holds at most

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1100px; padding: 2rem 1.25rem 4rem; background: #fff; color: #202124;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid #e3e5e8; }
p { margin: .5rem 0; max-width: 46rem; }
code { font: .86em ui-monospace, Menlo, Consolas, monospace; background: #f4f5f6; padding: .08em .3em;
  border-radius: 3px; overflow-wrap: anywhere; }
.lead, .caption, figcaption, small { color: #5f6368; }
.caption, figcaption { font-size: .9rem; margin: .3rem 0 0; max-width: 46rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: .6rem 0; font-size: .95rem; }
dt { color: #5f6368; } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #eceef0; vertical-align: top; }
th { color: #5f6368; font-weight: 600; border-bottom-color: #c4c8cc; vertical-align: bottom; }
.text { text-align: left; } .number { text-align: right; white-space: nowrap; }
.matrix small { display: block; font-size: .8rem; line-height: 1.4; }
.matrix td.text { min-width: 8rem; } .facts td { min-width: 6rem; }
.dot { display: inline-block; width: .65em; height: .65em; border-radius: 50%; margin-right: .5em; }
.badge { font-size: .85rem; padding: .05em .5em; border-radius: 999px; background: #fdf1dc; color: #7a4b00; }
.badge.finished { background: #e3f5ec; color: #0b6e4f; } .badge.failed { background: #fde4e1; color: #a3190c; }
.bad { color: #a3190c; font-weight: 600; }
.alarm { border-left: 4px solid #d55e00; background: #fdf6f0; padding: .5rem .9rem; max-width: none; }
figure { margin: 1rem 0 1.8rem; overflow-x: auto; } .canvas { min-width: 640px; }
.choices { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; font-size: .9rem; }
select { font: inherit; max-width: 26rem; } summary { cursor: pointer; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""

_SCRIPT = """
for (const figure of document.querySelectorAll("figure.plot")) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const menus = [...figure.querySelectorAll("select")], last = menus.at(-1);
  const draw = () => {
    const lead = menus.slice(0, -1).map(menu => menu.selectedIndex + "/").join("");
    if (last) {
      const options = [...last.options];
      options.forEach((option, i) => { option.hidden = option.disabled = !(lead + i in spec.data); });
      if (options[last.selectedIndex].disabled) last.selectedIndex = options.findIndex(option => !option.disabled);
    }
    Plotly.react(figure.querySelector(".canvas"), spec.data[last ? lead + last.selectedIndex : ""], spec.layout,
      {displaylogo: false, responsive: true, modeBarButtons: [["toImage"]]});
  };
  menus.forEach(menu => menu.addEventListener("change", draw));
  draw();
}
"""


def render(runs: Sequence[RunFolder]) -> str:
    """The page of one or more runs. Raises BadInput without runs, or without Plotly."""
    if not runs:
        raise BadInput("a page needs at least one run; give the run folder of a benchmark")
    named: list[Named] = [(" · ".join(words), run) for words, run in zip(labels(runs), runs)]
    shown, absent = [], []
    for title, make, why in _SECTIONS:
        body = make(named)
        if body:
            shown.append(f"<section><h2>{escape(title)}</h2>\n{body}</section>")
        else:
            absent.append(f"<li>{why}</li>")
    if absent:
        shown.append(f"<section><h2>Not on this page</h2><ul>{''.join(absent)}</ul></section>")
    models = {str(page_tables.group(run.config, "model").get("source", "")) for run in runs} - {""}
    lead = f"Speculative decoding of {', '.join(sorted(models))}" if models else "Speculative decoding"
    many = f", {len(runs)} runs side by side" if len(runs) > 1 else ""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>eagle4: {escape(', '.join(run.path.name for run in runs[:3]))}</title>",
            f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style>\n<script>{_plotly()}</script>\n</head>\n<body>',
            f'<h1>What speculation was worth</h1>\n<p class="lead">{escape(lead + many)}.</p>',
            *_alarms(named),
            *shown,
            f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise BadInput("the page needs plotly; install it: pip install plotly") from error
    return get_plotlyjs()


def _alarms(named: Sequence[Named]) -> list[str]:
    """A line for every run that did not come to its end: figures below may be missing or of fewer prompts."""
    return [
        f'<p class="alarm">{escape(label or run.path.name)}: {page_tables.state(run)}</p>'
        for label, run in named
        if run.state != "finished"
    ]


def figure(plot: Plot | None) -> str:
    """A figure with its menus and caption; its traces stand beside it as JSON. Empty without a plot."""
    if plot is None:
        return ""
    menus = [
        f"<label>{escape(title)} <select>{''.join(f'<option>{escape(o)}</option>' for o in options)}</select></label>"
        for title, options in plot.choices
    ]
    spec = json.dumps(
        plain({"data": plot.data, "layout": plot.layout}), allow_nan=False, separators=(",", ":")
    )
    spec = spec.replace("</", "<\\/")  # a closing tag inside a text would end the script element
    return (
        f'<figure class="plot" id="{plot.name}"><div class="choices">{"".join(menus)}</div>'
        f'<div class="canvas"></div><script type="application/json">{spec}</script>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>\n"
    )


def _protocol(named: Sequence[Named]) -> str:
    told = []
    if any(run.rows for _, run in named):
        told.append(
            "Plain decoding is a method like the others: the same compiled loop, the same clock, the same prompts. The "
            "methods take turns prompt by prompt, and which goes first rotates, so that a drift of the machine hits "
            "all alike. Times are those of decoding: prefill and compilation are not in them. A speed-up is the ratio "
            "of pooled tokens per second, method over plain decoding; its interval is a 95 % paired bootstrap over "
            f"prompts ({RESAMPLES} resamples)."
        )
    if any(run.load for _, run in named):
        told.append(
            "Under load a batch of requests is decoded together, each method in turn, and held against plain decoding "
            "of the same batch. The first decode of each method compiles and is not counted."
        )
    if any(run.replay for _, run in named):
        told.append(
            "Replayed points were not timed: they are rounds walked along recorded answers, and their milliseconds "
            "are a cost table's."
        )
    if told:
        told.append(
            "τ, the acceptance length, is the mean number of tokens per round, the target's own token included, "
            "before an answer is cropped at a stop token or at its limit."
        )
    return "".join(f"<p>{sentence}</p>" for sentence in told)


def _lossless(named: Sequence[Named]) -> str:
    return "".join(f"<p>{sentence}</p>" for sentence in page_tables.lossless(named))


def _comparison(named: Sequence[Named]) -> str:
    if not any(run.rows for _, run in named):
        return ""
    caption = (
        "Speed-up over plain decoding, acceptance length τ, decoded tokens per second and, where there are several "
        "prompts, the speed-up's 95 % interval: one that holds 1 has shown no difference."
    )
    return f'{page_tables.comparison(named)}<p class="caption">{caption}</p>'


def _acceptance(named: Sequence[Named]) -> str:
    return figure(page_plots.acceptance(named)) + figure(page_plots.lengths(named))


def _cost(named: Sequence[Named]) -> str:
    best = page_tables.best(named) if any(run.replay for _, run in named) else ""
    return figure(page_cost.length_and_cost(named)) + best


def _predictions(named: Sequence[Named]) -> str:
    plot = page_cost.predictions(named)
    return figure(plot) + page_tables.off_by(named) if plot else ""


def _load(named: Sequence[Named]) -> str:
    return figure(page_plots.load(named)) + page_tables.loads(named) if any(r.load for _, r in named) else ""


def _trees(named: Sequence[Named]) -> str:
    found = []
    for label, run in named:
        drawn = [
            f"<details{' open' if i == 0 else ''}><summary>{escape(title)}</summary>"
            f'<div class="wide">{svg}</div></details>'
            for i, (title, svg) in enumerate(run.trees[:TREES])
        ]
        if drawn:
            more = f", the first {TREES} of {len(run.trees)} rounds" if len(run.trees) > TREES else ""
            title = escape(f"{label or run.config.get('name', run.path.name)}{more}")
            prompt = escape(str(run.config.get("prompt", "")))
            found.append(f"<h3>{title}</h3><p><q>{prompt}</q></p>{''.join(drawn)}")
    if not found:
        return ""
    caption = "Every round's draft tree, from the last committed token on the left; green was accepted, grey rejected."
    return f'{"".join(found)}<p class="caption">{caption}</p>'


_RUN_BENCHMARK = "<code>python -m experiments.benchmark</code>"
# Title, what makes the section's HTML (empty: nothing of the kind), and the line that stands for an empty one.
_SECTIONS: tuple[tuple[str, Callable[[Sequence[Named]], str], str], ...] = (
    ("What was run", page_tables.ran, ""),
    ("How it was measured", _protocol, "How it was measured: no run here has results yet."),
    ("Losslessness", _lossless, f"Losslessness: no answers were compared; {_RUN_BENCHMARK} compares them."),
    ("Methods by category", _comparison, f"Methods by category: no benchmark results; run {_RUN_BENCHMARK}."),
    (
        "Acceptance",
        _acceptance,
        f"Acceptance: nothing was drafted in a benchmark; run {_RUN_BENCHMARK} with a method that drafts.",
    ),
    ("Length against cost", _cost, f"Length against cost: no method has a speed-up; run {_RUN_BENCHMARK}."),
    (
        "Time per phase",
        lambda named: figure(page_plots.phases(named)),
        "Time per phase: no phases were timed; run the benchmark with <code>phase_tokens=12</code>.",
    ),
    (
        "Predicted against real cost",
        _predictions,
        "Predicted against real cost: no rounds were priced; <code>method=eagle4</code> prices them.",
    ),
    (
        "Decisions over time",
        lambda named: figure(page_plots.decisions(named)),
        f"Decisions over time: no rounds of a drafting method were kept; {_RUN_BENCHMARK} keeps them.",
    ),
    (
        "Under load",
        _load,
        "Under load: no run of batches; run <code>python -m experiments.load method=eagle4</code>.",
    ),
    (
        "Drawn trees",
        _trees,
        "Drawn trees: none in these folders; run <code>python -m experiments.draw</code> and give its folder too.",
    ),
)
