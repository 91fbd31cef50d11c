"""A drafter without a network: candidates and probabilities of the next token, looked up by the last one.

The simplest drafter that draws real trees. `experiments.tree_cost` uses it to time what growing a tree costs apart
from any network.
"""

from eagle4.drafters.base import Drafter
from eagle4.drafters.tree_drafting import draft_tree
from eagle4.specs import DrafterSpec, TreeSpec
from eagle4.tree.grow import Decide


def make(spec: DrafterSpec, tree: TreeSpec, decide: Decide) -> Drafter:
    """`params` = {"ids": [V, C], "probs": [V, C]}: row t holds the candidates after token t; rows sum to 1."""
    del spec

    def propose(params, state, root, plan, keys):
        follow, root_q = lookup(params, root)
        guesses, _ = draft_tree(tree, follow, (), root, root_q, keys, plan, decide)
        return guesses, state

    return Drafter(
        init=lambda params, tokens, length: (),
        propose=propose,
        commit=lambda params, state, commit, start: state,
    )


def lookup(params, root):
    """The step of a table drafter, and the root's candidates."""

    def follow(carry, frontier):
        return params["ids"][frontier.tokens], params["probs"][frontier.tokens], carry

    return follow, (params["ids"][root], params["probs"][root])
