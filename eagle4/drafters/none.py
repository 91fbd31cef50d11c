"""Plain autoregressive decoding as a drafter that guesses nothing: every round verifies the root alone."""

import jax.numpy as jnp

from eagle4.drafters.base import Drafter
from eagle4.specs import DrafterSpec, TreeSpec
from eagle4.tree.grow import Decide
from eagle4.types import Draft


def make(spec: DrafterSpec, tree: TreeSpec, decide: Decide) -> Drafter:
    """A drafter without parameters or state; the tree is one node whatever the envelope."""
    del spec, tree, decide

    def propose(params, state, root, plan, keys):
        del params, plan, keys
        B = root.shape[0]
        zeros = jnp.zeros((B, 1), jnp.int32)
        draft = Draft(
            tokens=root[:, None],
            parent=zeros - 1,
            depth=zeros,
            attend=jnp.ones((B, 1, 1), bool),
            candidate=jnp.zeros((B, 1), bool),
            score=jnp.zeros((B, 1), jnp.float32),
            q=None,
        )
        return draft, state

    return Drafter(
        init=lambda params, tokens, length: (),
        propose=propose,
        commit=lambda params, state, commit, start: state,
    )
