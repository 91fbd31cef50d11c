"""Trees equal a published runtime's, node for node: 24 recorded runs of an EAGLE-2 token tree.

Each case records what the drafter returned at every level (ids in its own vocabulary, log probabilities) and
what the runtime made of it. Its `budget` does not count the root and its frontier masks leave the root out.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle4.specs import TreeSpec
from eagle4.tree import grow, topology
from eagle4.types import Plan

CASES = json.loads((Path(__file__).parent / "golden" / "mnn_token_tree.json").read_text())
ENVELOPE = TreeSpec("dynamic", depth=8, width=8, children=8, nodes=41)


def replayed(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """The recorded drafter answers as [level, W, K] arrays; slots the case does not fill hold poison."""
    ids = np.full((ENVELOPE.depth, 8, 8), -999, np.int32)
    logps = np.full((ENVELOPE.depth, 8, 8), np.nan, np.float32)
    offset = np.array(case["d2t"])
    for level, (index, score) in enumerate(zip(case["indices"], case["scores"])):
        index, k = np.array(index), case["topk"]
        rows = 1 if level == 0 else k
        ids[level, :rows, :k] = (index + offset[index]).reshape(rows, k)
        logps[level, :rows, :k] = np.array(score, np.float32).reshape(rows, k)
    return ids, logps


@jax.jit
def run(ids, logps, root, plan):
    def step(carry, frontier):
        tokens, attend = carry
        level = frontier.depth
        carry = (tokens.at[level].set(frontier.tokens), attend.at[level].set(frontier.attend))
        return ids[level][None], logps[level][None], carry

    shape = (ENVELOPE.depth, 1, 8)
    carry = (jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, 64), bool))
    pool, (tokens, attend) = grow.grow(step, carry, (ids[:1, 0], logps[:1, 0]), ENVELOPE, plan)
    draft = grow.rerank(pool, root, plan.nodes, ENVELOPE)
    return draft, tokens[:, 0], attend[:, 0], topology.paths(draft.parent, 8)


def replay(case: dict, depth: int):
    ids, logps = replayed(case)
    k, nodes = case["topk"], case["budget"] + 1
    plan = Plan(jnp.int32(depth), jnp.int32(k), jnp.int32(k), jnp.int32(nodes))
    return run(jnp.asarray(ids), jnp.asarray(logps), jnp.asarray([case["root"]], jnp.int32), plan)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"k{c['topk']}-d{c['depth']}-n{c['budget']}")
def test_tree_equals_the_runtime_node_for_node(case: dict):
    draft, _, _, paths = replay(case, case["depth"])
    count = len(case["draft_tokens"])
    assert int((np.asarray(draft.parent[0]) >= 0).sum()) + 1 == count
    assert draft.tokens[0, :count].tolist() == case["draft_tokens"]
    assert draft.depth[0, :count].tolist() == case["position_ids"]
    rows = ["".join("01"[int(x)] for x in row[:count]) for row in np.asarray(draft.attend[0, :count])]
    assert rows == case["attention_mask"]
    # The runtime lists leaves in creation order, which is node order.
    leaf = np.flatnonzero(topology.leaves(draft.parent)[0])
    found = [[int(n) for n in paths[0, i] if n >= 0] for i in leaf]
    assert found == case["retrieve_indices"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"k{c['topk']}-d{c['depth']}-n{c['budget']}")
def test_frontier_of_every_level_equals_the_runtime(case: dict):
    # One level more than recorded: its answers are poison, but its frontier is the last recorded one.
    _, tokens, attend, _ = replay(case, case["depth"] + 1)
    k = case["topk"]
    for level in range(1, case["depth"] + 1):
        assert tokens[level, :k].tolist() == case["active_ids"][level - 1]
        mask = np.asarray(attend[level, :k]).reshape(k, ENVELOPE.depth, 8)[:, :level, :k]
        assert mask.astype(int).ravel().tolist() == case["active_masks"][level - 1]
        assert np.asarray(attend[level, :k]).sum() == mask.sum()


def test_all_cases_share_one_compiled_program():
    for case in CASES[:3]:
        replay(case, case["depth"])
    assert run._cache_size() == 1
