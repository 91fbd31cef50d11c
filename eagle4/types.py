"""The records that flow through one round of speculative decoding.

All are pytrees (`flax.struct.dataclass`) with a leading batch axis B. Letters: B batch, N tree nodes, S cache slots,
P longest accepted path, D model width, A feature taps, V vocabulary, C candidates, K children per node, G kv heads,
E head width. Sentinel −1 means "no node". They live outside the packages under the jaxtyping import hook: the hook
breaks `flax.struct` classes under vmap, scan and grad.
"""

from typing import Any, NamedTuple

from flax import struct
from jaxtyping import Array, Bool, Float, Int32


@struct.dataclass
class KVCache:
    """Keys and values of committed tokens, slot s holding position s; the root token is not in it yet.

    Read-only during a round: nothing rejected ever enters it, so there is nothing to roll back.
    Slots at or beyond `length` may hold any key and any finite value, and must never influence a result. (Values
    must be finite because 0 · NaN is NaN; masking them would copy the cache once a layer, twice attention's cost.)
    """

    k: tuple[Float[Array, "B G S E"], ...]
    v: tuple[Float[Array, "B G S E"], ...]
    length: Int32[Array, " B"]


@struct.dataclass
class TargetOut:
    """What one forward pass of the target returns for N new rows.

    `logits` may cover fewer rows than the rest (prefill keeps only each row's last). `features` are the residual
    streams at the tapped `hidden_states` indices (0 = embedding, k = output of layer k − 1, before the final norm);
    `hidden` is after the final norm. `k` and `v` are the new rows only, per layer.
    """

    logits: Float[Array, "B N V"]
    features: Float[Array, "B N A D"]
    hidden: Float[Array, "B N D"]
    k: tuple[Float[Array, "B G N E"], ...]
    v: tuple[Float[Array, "B G N E"], ...]


@struct.dataclass
class Proposal:
    """The distribution each node's children were drawn from: `probs` over `ids`, zero elsewhere.

    Rows sum to 1 over C; slots with zero probability are inert and their ids are ignored. With C = V and
    ids = 0..V−1 it is a full distribution.
    """

    ids: Int32[Array, "B N C"]
    probs: Float[Array, "B N C"]


@struct.dataclass
class Draft:
    """A tree of guesses. Node 0 is the root: the last committed token, whose K/V the target has not computed yet.

    Parents come before their children, and siblings stand in draft order (the order in which they are tried).
    `parent` is −1 for the root and for unused nodes; unused nodes have `candidate` False and attend to themselves
    only. `attend[b, n, m]` says that node n sees node m (ancestors and itself). `score` is the log probability of
    the path from the root under the drafter (0 at the root). `q` is None when children are deterministic picks,
    that is, a point mass each. `levels` counts the levels that were drafted, whether or not their nodes were kept
    (None: the drafter has no steps to pay for).
    """

    tokens: Int32[Array, "B N"]
    parent: Int32[Array, "B N"]
    depth: Int32[Array, "B N"]
    attend: Bool[Array, "B N N"]
    candidate: Bool[Array, "B N"]
    score: Float[Array, "B N"]
    q: Proposal | None
    levels: Int32[Array, ""] | None = None


@struct.dataclass
class Verdict:
    """Which path was accepted: `path[b, i]` is the node at depth i + 1, −1 beyond `num_accepted`.

    `next_token` is the target's own token, drawn after the accepted path.
    """

    path: Int32[Array, "B P"]
    num_accepted: Int32[Array, " B"]
    next_token: Int32[Array, " B"]


@struct.dataclass
class Commit:
    """What a round commits. `tokens[:, i]` follows the node that `features[:, i]` and `hidden[:, i]` belong to.

    Row i of features is that of the root (i = 0) or of the i-th accepted node, so (features[i], tokens[i]) is the
    pair an EAGLE drafter reads. Only the first `num_committed` entries mean anything; it is num_accepted + 1 before
    cropping at a stop token or at the length limit, and 0 for a row that had already ended. What lies beyond is finite.
    """

    tokens: Int32[Array, "B P1"]
    num_committed: Int32[Array, " B"]
    features: Float[Array, "B P1 A D"]
    hidden: Float[Array, "B P1 D"]


class Plan(NamedTuple):
    """How much to speculate in a round: levels to draft, frontier width, children per node, nodes to verify.

    Data, not shapes: every value up to the tree envelope runs in the same compiled program. `nodes` counts the root.
    `price` is what the policy's own decisions inside the round need (a pytree of its choice); a drafter hands it on.
    """

    depth: Int32[Array, ""]
    width: Int32[Array, ""]
    children: Int32[Array, ""]
    nodes: Int32[Array, ""]
    price: Any = ()


@struct.dataclass
class RoundInfo:
    """What happened in a round; never needed by the next one.

    `drafted_depth` and `drafted_nodes` describe the tree that was verified (root not counted), `verified_nodes` the
    bucket of rows the target really computed (root counted), `levels` how many levels the drafter computed. A row that
    had ended before the round has `active` False and zeros. `num_committed` is after cropping. By node: `score`, the
    drafter's log path probability (−inf: no node), its `depth`, and whether it was `taken` into the accepted path.
    `predicted_ms` is what the cost table says the round takes, NaN without a table.
    """

    active: Bool[Array, " B"]
    drafted_depth: Int32[Array, " B"]
    drafted_nodes: Int32[Array, " B"]
    verified_nodes: Int32[Array, ""]
    num_accepted: Int32[Array, " B"]
    num_committed: Int32[Array, " B"]
    levels: Int32[Array, ""]
    score: Float[Array, "B N"]
    depth: Int32[Array, "B N"]
    taken: Bool[Array, "B N"]
    predicted_ms: Float[Array, ""]


@struct.dataclass
class DecodeState:
    """Everything the next round needs. Invariant: cache.length = length − 1 for rows that are not done.

    `tokens` holds prompt and answer, right-padded; `length` counts both, the root (last committed token) included,
    and never exceeds `limit` (prompt plus the request's new-token budget). `stop_ids` is shared by all rows. `seed`
    identifies the request: random numbers are folded from (seed, position), so a row's draws do not depend on its
    neighbours.
    """

    tokens: Int32[Array, "B S"]
    length: Int32[Array, " B"]
    prompt_length: Int32[Array, " B"]
    limit: Int32[Array, " B"]
    stop_ids: Int32[Array, " K"]
    done: Bool[Array, " B"]
    seed: Int32[Array, " B"]
    cache: KVCache
    drafter: Any
    policy: Any
