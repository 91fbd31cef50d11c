"""Parameter trees as data: one abstract tree gives shapes, initial values and shardings.

A model describes its parameters once, as a tree of `Leaf`. Loading checks against it, tests and drafters initialise
from it, and meshes shard by its axis names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Leaf:
    """One parameter: shape, a name per axis (embed, vocab, heads, kv_heads, ffn or None), and how it starts.

    `init` is normal (scaled by 1/√fan-in), ones or zeros.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"


def initialise(tree: Any, key: jax.Array, dtype: Any = jnp.float32) -> Any:
    """Random parameters for an abstract tree; each leaf's draw depends on its place in the tree."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten([_initial(leaf, k, dtype) for leaf, k in zip(leaves, keys)])


def _initial(leaf: Leaf, key: jax.Array, dtype: Any) -> jax.Array:
    if leaf.init == "ones":
        return jnp.ones(leaf.shape, dtype)
    if leaf.init == "zeros":
        return jnp.zeros(leaf.shape, dtype)
    return (jax.random.normal(key, leaf.shape) / math.sqrt(leaf.shape[-1])).astype(dtype)


def shardings(tree: Any, mesh: Mesh, rules: Mapping[str, str | None]) -> Any:
    """A NamedSharding per leaf: `rules` maps an axis name to a mesh axis; axes without a rule are replicated."""
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*(rules.get(a) if a else None for a in leaf.axes))),
        tree,
    )
