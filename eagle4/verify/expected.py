"""What verifiers accept on average, for given pairs of target and drafter distributions; on the host, in NumPy.

The uniforms are integrated through the exposed laws and the drafts are enumerated where there are few enough, so that
two rules can be compared without noise. Letters: M pairs, V vocabulary, T drafts, K siblings.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from eagle4.types import Draft, Proposal
from eagle4.verify.block import chain_law
from eagle4.verify.walk import Law

# More possible drafts than this are sampled instead of listed.
MOST_DRAFTS = 4096


class Pairs(NamedTuple):
    """Target and drafter distributions at M places, ordered by falling q; the last token gathers all with q = 0."""

    p: Float[np.ndarray, "M V"]
    q: Float[np.ndarray, "M V"]


class Siblings(NamedTuple):
    """Possible ordered children of a node and their probabilities; −1 stands for a child that cannot be drawn."""

    tokens: Int[np.ndarray, "M T K"]
    weight: Float[np.ndarray, "M T"]


def compact(p: Float[np.ndarray, "M U"], q: Float[np.ndarray, "M U"]) -> Pairs:
    """Merge the tokens that the drafter never proposes: no verifier tells them apart before the final draw."""
    size = int((q > 0).sum(-1).max())
    order = np.argsort(-q, axis=-1, kind="stable")[:, :size]
    near, far = np.take_along_axis(p, order, -1), 1 - np.take_along_axis(p, order, -1).sum(-1, keepdims=True)
    kept = np.take_along_axis(q, order, -1)
    far = np.maximum(far, 0.0)
    return Pairs(np.concatenate([near, far], -1), np.concatenate([kept, np.zeros_like(far)], -1))


def picks(pairs: Pairs, count: int) -> Siblings:
    """The likeliest `count` tokens under q, for certain."""
    rank = np.arange(count)
    tokens = np.where(rank < (pairs.q > 0).sum(-1, keepdims=True), rank, -1)
    return Siblings(tokens[:, None, :], np.ones((len(pairs.q), 1)))


def draws(pairs: Pairs, count: int, replace: bool, samples: int, rng: np.random.Generator) -> Siblings:
    """Children drawn from q: all possibilities, or `samples` of them if there are more than MOST_DRAFTS."""
    size = pairs.q.shape[-1] + 1
    if size**count > MOST_DRAFTS:
        return _sampled(pairs, count, replace, samples, rng)
    grid = np.array(list(itertools.product(range(size), repeat=count)))
    left = np.repeat(pairs.q[:, None], len(grid), axis=1)
    weight = np.ones(left.shape[:2])
    for k in range(count):
        mass = left.sum(-1, keepdims=True)
        chance = np.concatenate([left / np.where(mass > 0, mass, 1.0), mass == 0], axis=-1)
        child = np.broadcast_to(grid[None, :, k, None], (*weight.shape, 1))
        weight *= np.take_along_axis(chance, child, -1)[..., 0]
        if not replace:
            left = np.where(np.arange(size - 1) == child, 0.0, left)
    tokens = np.where(grid < size - 1, grid, -1)
    return Siblings(np.broadcast_to(tokens, (len(pairs.q), *tokens.shape)), weight)


def _sampled(pairs: Pairs, count: int, replace: bool, samples: int, rng: np.random.Generator) -> Siblings:
    tokens = np.full((len(pairs.q), samples, count), -1)
    for row, q in zip(tokens, pairs.q):
        support = np.flatnonzero(q)
        if replace:
            row[:] = rng.choice(support, (samples, count), p=q[support] / q[support].sum())
        else:  # the order of Gumbel-perturbed log q is the order of draws without replacement
            keys = np.log(q[support]) + rng.gumbel(size=(samples, len(support)))
            row[:, : len(support)] = support[np.argsort(-keys, axis=-1)[:, :count]]
    return Siblings(tokens, np.full(tokens.shape[:2], 1 / samples))


def rank_acceptance(
    law: Law, pairs: Pairs, drawn: Siblings, counts: Sequence[int]
) -> dict[int, Float[np.ndarray, "M K"]]:
    """P(the k-th child is the accepted one), at nodes that keep their first m children, for every m in counts."""
    kept = np.arange(drawn.tokens.shape[-1]) < np.array(counts)[:, None, None, None]
    shape = (len(counts), *drawn.tokens.shape)
    p, q = (np.broadcast_to(x[:, None], (*shape[:-1], x.shape[-1])) for x in pairs)
    rows = (
        (p, jnp.float32),
        (np.broadcast_to(drawn.tokens, shape), jnp.int32),
        (kept & (drawn.tokens >= 0), bool),
        (np.broadcast_to(np.arange(q.shape[-1]), q.shape), jnp.int32),
        (q, jnp.float32),
    )
    take = law(*(jnp.asarray(x.reshape(-1, x.shape[-1]), dtype) for x, dtype in rows)).take
    mean = np.einsum("CMTK,MT->CMK", np.asarray(take, np.float64).reshape(shape), drawn.weight)
    return dict(zip(counts, mean))


def tree_tokens(parents: Sequence[int], acceptance: dict[int, Float[np.ndarray, " K"]]) -> float:
    """Expected tokens per round of a tree whose nodes have independent pairs: 1 + Σ over nodes of P(node reached).

    `acceptance[m]` holds the mean acceptance by rank at a node with m children.
    """
    reach = [1.0]
    for node in range(1, len(parents)):
        siblings = [n for n in range(1, len(parents)) if parents[n] == parents[node]]
        reach.append(reach[parents[node]] * float(acceptance[len(siblings)][siblings.index(node)]))
    return sum(reach)


def block_tokens(
    pairs: Pairs, places: Int[np.ndarray, "S D"], samples: int, rng: np.random.Generator
) -> Float[np.ndarray, " S"]:
    """Expected tokens per round of block verification on S chains; level i of chain s meets pair places[s, i]."""
    depth = places.shape[1]
    chains = Pairs(pairs.p[places], pairs.q[places])
    size = pairs.q.shape[-1]
    if size**depth <= MOST_DRAFTS:
        grid = np.array(list(itertools.product(range(size), repeat=depth)))
        tokens = np.broadcast_to(grid, (len(places), *grid.shape))
        weight = np.prod([chains.q[:, i][:, grid[:, i]] for i in range(depth)], axis=0)
    else:
        levels = [Pairs(chains.p[:, i], chains.q[:, i]) for i in range(depth)]
        each = [_sampled(level, 1, True, samples, rng).tokens[..., 0] for level in levels]
        tokens, weight = np.stack(each, axis=-1), np.full((len(places), samples), 1 / samples)
    stop = np.asarray(chain_law(*_chain_records(chains, tokens), depth).stop, np.float64)
    lengths = (stop @ np.arange(1, depth + 2)).reshape(weight.shape)
    return (lengths * weight).sum(-1)


def _chain_records(
    chains: Pairs, tokens: Int[np.ndarray, "S T D"]
) -> tuple[Float[jnp.ndarray, "B N V"], Draft]:
    """The chains as the verifier's records, B = S·T; the leaf's own p plays no part in how many are accepted."""
    rows, drafts, depth = tokens.shape
    batch = rows * drafts

    def spread(x):
        x = np.concatenate([x, x[:, -1:]], axis=1)
        return jnp.asarray(np.repeat(x, drafts, axis=0), jnp.float32)

    q = spread(chains.q)
    nodes = np.broadcast_to(np.arange(depth + 1), (batch, depth + 1))
    draft = Draft(
        tokens=jnp.asarray(np.pad(tokens.reshape(batch, depth), ((0, 0), (1, 0))), jnp.int32),
        parent=jnp.asarray(nodes - 1, jnp.int32),
        depth=jnp.asarray(nodes, jnp.int32),
        attend=jnp.asarray(np.broadcast_to(np.tri(depth + 1, dtype=bool), (batch, depth + 1, depth + 1))),
        candidate=jnp.asarray(nodes > 0),
        score=jnp.zeros((batch, depth + 1)),
        q=Proposal(jnp.broadcast_to(jnp.arange(q.shape[-1], dtype=jnp.int32), q.shape), q),
    )
    return spread(chains.p), draft


def transport_bound(pairs: Pairs, drawn: Siblings) -> Float[np.ndarray, " M"]:
    """What no verifier of these children can exceed: the most mass of p that can be coupled to a token among them.

    By max-flow min-cut it is min over sets S of tokens of 1 + p(S) − P(all children lie in S). The sets tried are
    those of the lowest p/q, so it is a bound in any case; for independent draws, where the last term is q(S)^K, it is
    the optimum (a concave function of (p(S), q(S)) is least at an extreme point). Optimal transport: SpecTr, arXiv
    2310.15141 §3; the sorted form: arXiv 2502.18779.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(np.where(pairs.q > 0, pairs.p / pairs.q, np.inf), axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    flat = np.maximum(drawn.tokens, 0).reshape(len(rank), -1)
    place = np.take_along_axis(rank, flat, -1).reshape(drawn.tokens.shape)
    last: Int[np.ndarray, "M T"] = np.where(drawn.tokens >= 0, place, -1).max(-1)
    inside: Bool[np.ndarray, "M T V"] = last[..., None] <= np.arange(-1, pairs.p.shape[-1])
    covered = np.einsum("MTV,MT->MV", inside, drawn.weight)
    mass = np.pad(np.take_along_axis(pairs.p, order, -1).cumsum(-1), ((0, 0), (1, 0)))
    return np.minimum((1 + mass - covered).min(-1), 1.0)
