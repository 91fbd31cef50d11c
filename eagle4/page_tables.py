"""What was run and what came of it, as tables and sentences of a page in HTML. Every text is escaped here."""

import shlex
from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from eagle4.bench import TIE_GAP
from eagle4.page_cost import priced
from eagle4.page_figure import Named, hue, places, series
from eagle4.page_plots import categories_of
from eagle4.runs import PLAIN, RunFolder, differences
from eagle4.summary import Row

BEST = 10
_DASH = "–"
_LONG = ("folder", "command")  # too long for a column
_LAWS = {
    "point_mass": "a drafted token is accepted with exactly the target's probability",
    "rejection": "a drawn token is accepted with probability min(1, p/q), a refused one leaves the residual",
    "block": "a drawn block is accepted by its joint probability, a refused one leaves the residual",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1, kind: str = "") -> str:
    """A table of ready HTML cells; the first `texts` columns are words, the others numbers on the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        sides = ["text" if i < texts else "number" for i in range(len(values))]
        return "".join(f'<{tag} class="{side}">{value}</{tag}>' for side, value in zip(sides, values))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return _DASH if value is None else f"{value:.{digits}f}{unit}"


def state(run: RunFolder) -> str:
    """The run's state as a badge, with what went wrong, or what is missing."""
    words = {
        "running": "unfinished: still running, or killed",
        "unknown": "unfinished: it left no status",
    }
    told = f'<span class="badge {escape(run.state)}">{escape(words.get(run.state, run.state))}</span>'
    if run.state == "failed":
        told += f" {escape((run.error or 'no message').splitlines()[0])}"
    if run.state != "finished" and run.rows:
        told += f" {max(row.prompts for row in run.rows)} prompts were measured before it ended."
    return told


def ran(runs: Sequence[Named]) -> str:
    """What was run: what all runs share once, a table of what they do not, and every difference of their configs."""
    facts = [_facts(run) for _, run in runs]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    shared = {k: facts[0][k] for k in keys if all(each.get(k) == facts[0].get(k) for each in facts)}
    terms = "".join(f"<dt>{escape(key)}</dt><dd>{value}</dd>" for key, value in shared.items())
    found = f"<dl>{terms}</dl>" if terms else ""
    names = [escape(label) for label, _ in runs]
    apart = [key for key in keys if key not in shared and key not in _LONG]
    if apart:
        lines = [[name, *(each.get(key, _DASH) for key in apart)] for name, each in zip(names, facts)]
        found += table(["run", *map(escape, apart)], lines, texts=len(apart) + 1, kind="facts")
    for key in _LONG:
        if key in keys and key not in shared:
            items = [f"<dt>{name}</dt><dd>{each.get(key, _DASH)}</dd>" for name, each in zip(names, facts)]
            found += f"<details><summary>{key}s</summary><dl>{''.join(items)}</dl></details>"
    return found + _configs(runs, names)


def _configs(runs: Sequence[Named], names: Sequence[str]) -> str:
    apart = differences([run for _, run in runs])
    if not apart:
        return ""
    lines = [
        [f"<code>{escape(k)}</code>", *(escape(v or _DASH) for v in values)] for k, values in apart.items()
    ]
    inner = table(["key", *names], lines, texts=len(runs) + 1)
    return f"<details><summary>all differences of their configs</summary>{inner}</details>"


def _facts(run: RunFolder) -> dict[str, str]:
    """Facts of a run in ready HTML; what the folder does not say is left out."""
    config, env = run.config, run.environment
    model, data, sampling, costs = (group(config, key) for key in ("model", "data", "sampling", "costs"))
    device, git = group(env, "device"), group(env, "git")
    facts: dict[str, Any] = {"experiment": run.kind or None}
    facts["model"] = " in ".join(str(model[k]) for k in ("source", "dtype") if k in model)
    cores = f"{device['cores']} cores" if device.get("platform") == "cpu" and "cores" in device else ""
    name = device.get("cpu_model") if device.get("platform") == "cpu" else device.get("device_kind")
    count = f"{device.get('device_count')} × " if device.get("device_count", 1) != 1 else ""
    facts["machine"] = ", ".join(filter(None, (f"{count}{name}" if name else "", cores)))
    facts["software"] = ", ".join(f"{k} {device[k]}" for k in ("eagle4", "jax", "python") if k in device)
    dirty = ", with uncommitted changes" if git.get("dirty") else ""
    facts["commit"] = f"{str(git['commit'])[:12]}{dirty}" if git.get("commit") else None
    facts["date"] = _date(run)
    if data:
        path = data.get("path") or "the packaged prompts"
        many = f", at most {data['limit']}" if data.get("limit") else ""
        facts["prompts"] = f"{path}{many}; up to {data.get('max_new_tokens', '?')} new tokens an answer"
    facts["sampling"] = sampled(sampling) if sampling else None
    facts["cost table"] = (costs.get("table") or "measured on this machine") if costs else None
    ready = {key: escape(str(value)) for key, value in facts.items() if value}
    ready |= {"state": state(run), "folder": f"<code>{escape(str(run.path))}</code>"}
    return (
        ready | {"command": _command(env)}
        if isinstance(env.get("command"), list) and env["command"]
        else ready
    )


def _command(environment: dict[str, Any]) -> str:
    app, *rest = map(str, environment["command"])
    return f"<code>{escape(shlex.join(['python', '-m', f'experiments.{Path(app).stem}', *rest]))}</code>"


def group(node: dict[str, Any], key: str) -> dict[str, Any]:
    """A group of a config, or of an environment; empty if it has none."""
    value = node.get(key)
    return value if isinstance(value, dict) else {}


def _date(run: RunFolder) -> str | None:
    begun, ended = (run.status.get(key) for key in ("started", "ended"))
    begun = run.environment.get("time") or begun
    try:
        start = datetime.fromisoformat(str(begun))
        spent = (datetime.fromisoformat(str(ended)) - start).total_seconds() if ended else None
    except ValueError:
        return str(begun) if begun else None
    took = "" if spent is None else f", {spent / 60:.0f} min" if spent >= 90 else f", {spent:.0f} s"
    return f"{start:%Y-%m-%d %H:%M} {start.tzname() or ''}{took}"


def sampled(sampling: dict[str, Any]) -> str:
    """How tokens were chosen: greedily, or at which temperature under which filters."""
    if not sampling.get("temperature"):
        return "greedy (temperature 0)"
    filters = [
        f"{k} {sampling[k]}"
        for k, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if sampling.get(k, off) != off
    ]
    return ", ".join([f"temperature {sampling['temperature']}", *filters])


def lossless(runs: Sequence[Named]) -> list[str]:
    """A sentence or two per run and kind of sampling: what shows that its answers are the target's own."""
    found: dict[str, None] = {}
    for label, run in runs:
        if not run.rows and not run.load:
            continue
        lead = f"<b>{escape(label)}</b>: " if label else ""
        if group(run.config, "sampling").get("temperature"):
            found[lead + _law(run)] = None
        else:
            found |= dict.fromkeys(lead + sentence for sentence in _identical(run))
    return list(found)


def _law(run: RunFolder) -> str:
    verifier = str(run.config.get("verifier") or "unknown")
    rule = f" ({_LAWS[verifier]})" if verifier in _LAWS else ""
    return (
        f"Drawn at {escape(sampled(group(run.config, 'sampling')))}, so answers are draws and not compared token by "
        f"token. The accept rule of the method under study is <code>{escape(verifier)}</code>{rule}; that what it "
        "emits has the target's distribution is enumerated in <code>tests/test_verify_exact_law.py</code>, and for "
        "adaptive policies in <code>tests/test_adaptive_law.py</code>."
    )


def _identical(run: RunFolder) -> list[str]:
    """How many prompts got plain decoding's ids: one sentence for all methods that had all, one for each other.

    Answers that nobody compared say nothing, for or against.
    """
    counts = {m: _verdict(run, m) for m in dict.fromkeys(r.method for r in run.rows if r.method != PLAIN)}
    whole: dict[tuple[int, int], list[str]] = {}
    cases = [r["identical"] for r in run.load if r["method"] != PLAIN and r.get("identical") is not None]
    held = f"Greedy ids identical to plain decoding's of the same batch in {cases.count(True)} of {len(cases)} cases."
    found = [held if all(cases) else f'<span class="bad">{held}</span>'] if cases else []
    for method, (same, total, ties) in counts.items():
        if not total:
            found.append(f"The ids of <code>{escape(method)}</code> were not compared with plain decoding's.")
        elif same == total:
            whole.setdefault((total, ties), []).append(f"<code>{escape(method)}</code>")
        else:
            found.append(
                f'<span class="bad">{escape(method)} DIFFERS from plain decoding: ids identical on {same} of '
                f"{total} prompts.</span>"
            )
    for (total, ties), methods in whole.items():
        tied = (
            f"{ties} tie{'s' * (ties != 1)} (two logits within {TIE_GAP:g} of each other)"
            if ties
            else "no ties"
        )
        found.append(
            f"Greedy ids identical to plain decoding's on {total} of {total} prompts, {tied}: {', '.join(methods)}."
        )
    return found


def _verdict(run: RunFolder, method: str) -> tuple[int, int, int]:
    """(prompts with identical ids, prompts compared, ties) of a method; by rows if no requests were kept."""
    own = [r for r in run.requests if r["method"] == method and r.get("verify/identical") is not None]
    if own:
        wrong = {r["prompt_id"] for r in own if not r["verify/identical"]}
        prompts = {r["prompt_id"] for r in own}
        return len(prompts - wrong), len(prompts), sum(r.get("verify/ties") or 0 for r in own)
    own_rows = (row for row in run.rows if row.method == method and row.category != "all")
    rows = [row for row in own_rows if row.greedy_identical is not None]
    same = sum(row.prompts for row in rows if row.greedy_identical)
    return same, sum(row.prompts for row in rows), sum(row.ties for row in rows)


def comparison(runs: Sequence[Named]) -> str:
    """Methods by categories: speed-up, its interval, acceptance length and tokens per second in every cell."""
    place, categories = places(runs), categories_of(runs)
    lines = []
    for label, run in runs:
        by_key = {(row.method, row.category): row for row in run.rows}
        for method in dict.fromkeys(row.method for row in run.rows):
            name = series(method, label)
            dot = f'<span class="dot" style="background:{hue(place.get(name))}"></span>'
            cells = [_cell(by_key.get((method, category))) for category in categories]
            lines.append([f"{dot}{escape(name)}", *cells])
    heads = ["all prompts" if c == "all" else escape(c) for c in categories]
    return table(["method", *heads], lines, kind="matrix")


def _cell(row: Row | None) -> str:
    if row is None:
        return _DASH
    known = row.speedup_low is not None and row.speedup_high is not None and row.method != PLAIN
    interval = f"{row.speedup_low:.2f}–{row.speedup_high:.2f}" if known else ""
    mark = ' <span class="bad">DIFFERS</span>' if row.greedy_identical is False else ""
    lines = (f"τ {number(row.tau)}", number(row.tokens_per_s, 1, " tok/s"), interval)
    small = "".join(f"<small>{text}</small>" for text in lines if text)
    return f"<b>{number(row.speedup_vs_ar, 2, '×')}</b>{mark}{small}"


def off_by(runs: Sequence[Named]) -> str:
    """Per method that was priced, mean predicted and measured time of its rounds; every answer weighs the same."""
    lines = []
    for label, run in runs:
        pairs = priced(run)
        for method in dict.fromkeys(key[0] for key in pairs):
            own = [pair for key, pair in pairs.items() if key[0] == method]
            told, taken = (sum(pair[i] for pair in own) / len(own) for i in (0, 1))
            error = f"{taken / told - 1:+.0%}" if told else _DASH
            lines.append(
                [escape(series(method, label)), str(len(own)), number(told, 1), number(taken, 1), error]
            )
    return table(["method", "answers", "predicted ms", "measured ms", "measured over predicted"], lines)


def loads(runs: Sequence[Named]) -> str:
    """The rows of load runs."""
    lines = []
    for label, run in runs:
        for r in run.load:
            same = {None: _DASH, True: "yes", False: '<span class="bad">NO</span>'}[r.get("identical")]
            figures = [number(r["tokens_per_s"], 1), number(r["speedup_vs_ar"], 2, "×"), number(r["tau"])]
            chosen = [
                number(r["levels"]),
                number(r["nodes"]),
                number(r["round_ms"], 1),
                number(r["predicted_ms"], 1),
            ]
            lines.append([escape(series(r["method"], label)), str(r["batch"]), *figures, *chosen, same])
    heads = [
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
    ]
    return table(heads, lines)


def best(runs: Sequence[Named]) -> str:
    """The replayed settings of the highest speed-up, ten at most; the oracle is a bound and no setting."""
    found = [(label, r) for label, run in runs for r in run.replay]
    choices = [pair for pair in found if pair[1]["kind"] != "oracle" and pair[1]["speedup"] is not None]
    choices.sort(key=lambda pair: -pair[1]["speedup"])
    lines = [
        [
            escape(series(r["name"], label)),
            escape(r["kind"]),
            escape(", ".join(f"{key}={value}" for key, value in r["settings"].items()) or "as configured"),
            str(r["batch"]),
            number(r["speedup"], 2, "×"),
            number(r["tau"]),
            number(r["ms_per_token"], 1),
        ]
        for label, r in choices[:BEST]
    ]
    heads = ["name", "kind", "settings", "batch", "speed-up", "τ", "ms a token"]
    bounds = {}
    for _, r in found:
        if r["kind"] == "oracle" and r["speedup"] is not None:
            bounds[r["batch"]] = max(r["speedup"], bounds.get(r["batch"], 0))
    told = [f"{speedup:.2f}× at batch {batch}" for batch, speedup in sorted(bounds.items())]
    limit = f" The oracle, which knows the text beforehand, reaches {', '.join(told)}." if told else ""
    note = f"The {len(lines)} fastest of {len(choices)} replayed settings; costs are the table's, no clock ran.{limit}"
    return f'{table(heads, lines, texts=3)}<p class="caption">{note}</p>'
