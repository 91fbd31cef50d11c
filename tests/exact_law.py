"""The law of the emitted text, by enumeration.

All drafts of a tree over a tiny vocabulary are listed with the probability that the drafting scheme gives
them, the uniforms are integrated analytically through the laws that verifiers expose, and the text is
continued with the target. What comes out is the joint law of the next depth + 1 tokens. A verifier is
lossless if and only if it is the target's.

Target and drafter are tables conditioned on the whole prefix: `p[d][x1, …, xd]` is the distribution after x1
… xd.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle4.types import Draft, Proposal

CHUNK = 4096
TINY = 1e-12

CHAIN = (-1, 0, 1, 2)
BINARY = (-1, 0, 0, 1, 1, 2, 2)
UNEQUAL = (-1, 0, 0, 0, 1, 1, 4)
ONE_LEVEL = (-1, 0, 0, 0)
TREES = {"chain": CHAIN, "binary": BINARY, "unequal": UNEQUAL}


class Tables(NamedTuple):
    """Target p and drafter q, one array of shape [V] * (d + 1) for each prefix length d."""

    p: list[np.ndarray]
    q: list[np.ndarray]


class Drafts(NamedTuple):
    """Every draft of one tree: tokens [B, N], candidate [B, N] and probability [B]."""

    parents: tuple[int, ...]
    tokens: np.ndarray
    candidate: np.ndarray
    weight: np.ndarray


class Outcome(NamedTuple):
    """P(the path ends at node n) [B, N], and the law of the token emitted there [B, N, V]."""

    stop: np.ndarray
    emitted: np.ndarray


Scheme = Callable[[np.ndarray, np.ndarray], np.ndarray]


def make_tables(kind: str, vocab: int, depth: int, seed: int) -> Tables:
    """Random tables of a named kind; see the branches."""
    rng = np.random.default_rng(seed)

    def table(d, concentration=1.0):
        return rng.dirichlet([concentration] * vocab, size=(vocab,) * d)

    def keep(x, count):
        return normalise(np.where(x >= np.sort(x, axis=-1)[..., -count, None], x, 0.0))

    p = [table(d) for d in range(depth + 1)]
    q = [table(d) for d in range(depth + 1)]
    even = np.arange(vocab) % 2 == 0
    if kind == "filtered":  # as top-k or top-p leaves it
        p = [keep(x, 2) for x in p]
    elif kind == "sparse":
        q = [keep(x, 2) for x in q]
    elif kind == "sparse and filtered":
        p, q = [keep(x, 3) for x in p], [keep(x, 3) for x in q]
    elif kind == "equal":
        q = p
    elif kind == "near":
        q = [normalise(x + 0.05 * y) for x, y in zip(p, q)]
    elif kind == "hotter":
        q = [normalise(x**0.5) for x in p]
    elif kind == "disjoint":
        p, q = [normalise(x * even) for x in p], [normalise(x * ~even) for x in q]
    elif kind == "one hot":
        p, q = [keep(x, 1) for x in p], [keep(x, 1) for x in q]
    elif kind == "same one hot":
        p = [keep(x, 1) for x in p]
        q = p
    else:
        assert kind == "random", kind
    return Tables(p, q)


KINDS = (
    "random", "filtered", "sparse", "sparse and filtered", "equal", "near", "hotter", "disjoint", "one hot",
    "same one hot",
)  # fmt: skip


def normalise(x: np.ndarray) -> np.ndarray:
    return x / x.sum(-1, keepdims=True)


def independent(q: np.ndarray, elders: np.ndarray) -> np.ndarray:
    """The next child given its elder siblings: drawn with replacement."""
    return q


def without_replacement(q: np.ndarray, elders: np.ndarray) -> np.ndarray:
    """Drawn from q without the elder siblings; nobody (zeros) when q is used up."""
    left = q.copy()
    for elder in elders.T:
        rows = np.flatnonzero(elder >= 0)
        left[rows, elder[rows]] = 0.0
    mass = left.sum(-1, keepdims=True)
    return np.divide(left, mass, out=np.zeros_like(left), where=mass > 0)


def top_picks(q: np.ndarray, elders: np.ndarray) -> np.ndarray:
    """The k-th likeliest token, for certain."""
    return one_hot(np.argsort(-q, axis=-1, kind="stable")[:, elders.shape[1]], q.shape[-1])


def repeated_picks(q: np.ndarray, elders: np.ndarray) -> np.ndarray:
    """Likeliest, likeliest again, second, second again, …"""
    return one_hot(np.argsort(-q, axis=-1, kind="stable")[:, elders.shape[1] // 2], q.shape[-1])


def one_hot(index: np.ndarray, size: int) -> np.ndarray:
    return (index[:, None] == np.arange(size)).astype(float)


def enumerate_drafts(parents: tuple[int, ...], tables: Tables, scheme: Scheme) -> Drafts:
    """All drafts of positive probability. A child that cannot be drawn is no candidate, nor are its
    descendants.
    """
    size, vocab = len(parents), tables.q[0].shape[-1]
    tokens = np.full((1, size), -1)
    candidate = np.zeros((1, size), bool)
    weight = np.ones(1)
    for node in range(1, size):
        parent = parents[node]
        alive = candidate[:, parent] if parent else np.ones(len(tokens), bool)
        q = at_prefix(tables.q, tokens, path(parents, parent))
        elders = tokens[:, [n for n in range(node) if parents[n] == parent]]
        chance = np.where(alive[:, None], scheme(q, elders), 0.0)
        nobody = chance.sum(-1, keepdims=True) == 0
        rows, child = np.nonzero(np.concatenate([chance, nobody], axis=-1))
        drawn = child < vocab
        factor = np.where(drawn, chance[rows, np.minimum(child, vocab - 1)], 1.0)
        tokens, candidate, weight = tokens[rows], candidate[rows], weight[rows] * factor
        tokens[:, node] = np.where(drawn, child, -1)
        candidate[:, node] = drawn
    assert abs(weight.sum() - 1) < 1e-9
    return Drafts(parents, tokens, candidate, weight)


def path(parents: tuple[int, ...], node: int) -> list[int]:
    """Nodes from below the root down to `node`."""
    return [] if node == 0 else [*path(parents, parents[node]), node]


def at_prefix(table: list[np.ndarray], tokens: np.ndarray, nodes: list[int]) -> np.ndarray:
    """The distribution [B, V] after the tokens of those nodes."""
    if not nodes:
        return np.repeat(table[0][None], len(tokens), axis=0)
    return table[len(nodes)][tuple(tokens[:, n] for n in nodes)]


def records(drafts: Drafts, tables: Tables, candidates: int | None = None) -> tuple[np.ndarray, Draft]:
    """p [B, N, V] and the Draft record, float32. Dead nodes hold NaN; q is cut to its `candidates` likeliest
    ids.

    Slots of probability zero repeat the likeliest id, which a verifier must not notice.
    """
    parents, tokens, candidate, _ = drafts
    size = len(parents)
    alive = candidate | (np.arange(size) == 0)
    p = np.stack([at_prefix(tables.p, tokens, path(parents, n)) for n in range(size)], axis=1)
    q = np.stack([at_prefix(tables.q, tokens, path(parents, n)) for n in range(size)], axis=1)
    ids = np.argsort(-q, axis=-1, kind="stable")[..., :candidates]
    probs = np.take_along_axis(q, ids, axis=-1)
    assert np.allclose(probs.sum(-1), 1), "the proposal does not fit into that many candidates"
    ids = np.where(probs > 0, ids, ids[..., :1])
    attend = [[m in (0, n, *path(parents, n)) for m in range(size)] for n in range(size)]
    batched = functools.partial(np.repeat, repeats=len(tokens), axis=0)
    draft = Draft(
        tokens=tokens.astype(np.int32),
        parent=np.where(alive, np.array(parents), -1).astype(np.int32),
        depth=batched(np.array([[len(path(parents, n)) for n in range(size)]], np.int32)),
        attend=batched(np.array([attend])),
        candidate=candidate,
        score=np.zeros(tokens.shape, np.float32),
        q=Proposal(ids.astype(np.int32), np.where(alive[..., None], probs, np.nan).astype(np.float32)),
    )
    return np.where(alive[..., None], p, np.nan).astype(np.float32), draft


@functools.cache
def _jitted(law: Callable, **static: int) -> Callable:
    return jax.jit(functools.partial(law, **static))


def _in_chunks(call: Callable, arrays: tuple) -> tuple:
    """Rows in chunks of one size, so that a law compiles once for all cases."""
    rows = jax.tree.leaves(arrays)[0].shape[0]
    pad = -rows % CHUNK
    padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], pad, axis=0)]), arrays)
    parts = [
        call(*jax.tree.map(lambda x, i=i: jnp.asarray(x[i : i + CHUNK]), padded))
        for i in range(0, rows + pad, CHUNK)
    ]
    return jax.tree.map(lambda *x: np.concatenate([np.asarray(y, np.float64) for y in x])[:rows], *parts)


def kids_of(drafts: Drafts, max_children: int) -> np.ndarray:
    """Child nodes [N, K] in draft order, −1 padded."""
    size = len(drafts.parents)
    table = np.full((size, max_children), -1)
    for node in range(size):
        mine = [n for n in range(1, size) if drafts.parents[n] == node]
        table[node, : len(mine)] = mine
    return table


def node_laws(law: Callable, p: np.ndarray, draft: Draft, drafts: Drafts, max_children: int = 3) -> tuple:
    """The exposed law at every node of every draft: take [B, N, K] and residual [B, N, V]."""
    batch, size, vocab = p.shape
    kids = kids_of(drafts, max_children)
    valid = (kids >= 0) & np.asarray(draft.candidate)[:, kids]
    tokens = np.where(valid, np.asarray(draft.tokens)[:, kids], -1).astype(np.int32)
    rows = (p, tokens, valid, draft.q.ids, draft.q.probs)
    flat = tuple(np.asarray(x).reshape(batch * size, -1) for x in rows)
    take, residual = _in_chunks(_jitted(law), flat)
    return take.reshape(batch, size, max_children), residual.reshape(batch, size, vocab)


def outcome_of_node_law(law: Callable, p: np.ndarray, draft: Draft, drafts: Drafts) -> Outcome:
    """Integrate the acceptance uniforms of a walk down the tree: reach of a child = reach of its parent ×
    take.
    """
    take, residual = node_laws(law, p, draft, drafts)
    kids = kids_of(drafts, take.shape[-1])
    reach = np.zeros(p.shape[:2])
    reach[:, 0] = 1.0
    for node, k in np.argwhere(kids >= 0):
        there = reach[:, node] > 0
        reach[there, kids[node, k]] = (reach[:, node] * take[:, node, k])[there]
    live = reach > 0
    stop = np.where(live, reach * (1 - take.sum(-1)), 0.0)
    return Outcome(stop, _normalised(residual, p, live))


def outcome_of_chain_law(law: Callable, p: np.ndarray, draft: Draft, drafts: Drafts) -> Outcome:
    """A chain law states its outcome directly; node i of the tree must be the chain's i-th."""
    assert drafts.parents == tuple(range(-1, len(drafts.parents) - 1))
    depth = len(drafts.parents) - 1
    stop, residual = _in_chunks(_jitted(law, max_depth=depth), (p, draft))
    return Outcome(stop, _normalised(residual, p, stop > 0))


def _normalised(residual: np.ndarray, p: np.ndarray, live: np.ndarray) -> np.ndarray:
    """The draw of the walk: from the residual, or from p where it has no mass."""
    some = residual.sum(-1, keepdims=True) > TINY
    weights = np.where(live[..., None], np.where(some, residual, p), 1.0).astype(np.float64)
    assert (weights >= 0).all()
    return normalise(weights)


def sequence_law(drafts: Drafts, tables: Tables, outcome: Outcome) -> np.ndarray:
    """Joint law of the next depth + 1 tokens [V, …, V]: accepted path, emitted token, then the target."""
    depth = len(tables.p) - 1
    ends = [np.zeros_like(p) for p in tables.p]
    for node in range(len(drafts.parents)):
        nodes = path(drafts.parents, node)
        mass = drafts.weight[:, None] * outcome.stop[:, node, None] * outcome.emitted[:, node]
        live = outcome.stop[:, node] != 0
        if nodes:
            np.add.at(ends[len(nodes)], tuple(drafts.tokens[live, n] for n in nodes), mass[live])
        else:
            ends[0] += mass.sum(0)
    text = ends[0]
    for d in range(1, depth + 1):
        text = text[..., None] * tables.p[d] + ends[d]
    return text


def target_law(tables: Tables) -> np.ndarray:
    """Joint law of the next depth + 1 tokens under the target alone."""
    text = tables.p[0]
    for p in tables.p[1:]:
        text = text[..., None] * p
    return text


def expected_tokens(drafts: Drafts, outcome: Outcome) -> float:
    """Expected tokens committed by one round: accepted path plus the target's own token."""
    depth = np.array([len(path(drafts.parents, n)) for n in range(len(drafts.parents))])
    return float(np.sum(drafts.weight[:, None] * outcome.stop * (depth + 1)))


def deviation(drafts: Drafts, tables: Tables, outcome: Outcome) -> float:
    """max |law − target| over all texts."""
    return float(np.abs(sequence_law(drafts, tables, outcome) - target_law(tables)).max())
