"""The training loss of an EAGLE drafter over packed rows, and how often it agrees with the target."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from eagle4.drafters import eagle_net as net
from eagle4.nn.dense import dense
from eagle4.specs import EagleSpec
from eagle4.train.losses import TOKEN_LOSSES, Candidates, normalised, shared_candidates, smooth_l1, whole
from eagle4.train.spec import ObjectiveSpec
from eagle4.train.unroll import Rows, ahead, supervised_rows, unroll


class Frozen(NamedTuple):
    """What training reads and never changes: the target's embedding and head, which tokens are frequent, and the target
    ids of an own reduced head's rows (None for other heads)."""

    embed: Float[Array, "V F"]
    head: Float[Array, "V F"]
    frequent: Bool[Array, " V"]
    draft_ids: Int32[Array, " Vd"] | None = None


class Agreement(NamedTuple):
    """Per unrolled step j: supervised rows, and those where the drafter's best token was the target's at every step
    up to j."""

    rows: Int32[Array, " J"]
    right: Int32[Array, " J"]


def loss_and_agreement(
    params: dict[str, Any],
    spec: EagleSpec,
    objective: ObjectiveSpec,
    frozen: Frozen,
    rows: Rows,
    steps: int,
    key: jax.Array,
) -> tuple[Float[Array, ""], Agreement]:
    """The loss of `steps` unrolled steps, and agreement within the candidate set.

    The target's distribution for step j of row i comes from its hidden state at i + 1 + j. With an own head the
    candidates are its tokens, and rows whose next token lies outside have nothing to learn; the target's rows are
    learned on the whole vocabulary, of which drafting later sees a part.
    """
    sample, shake = jax.random.split(key)
    chosen, student_head = candidates_of(params, spec, objective, frozen, rows, sample)
    teacher_rows = dense(rows.hidden, frozen.head[chosen.ids]).astype(jnp.float32)
    inside = jnp.zeros(frozen.head.shape[0], bool).at[chosen.ids].set(True)
    if objective.noise:
        noise = jax.random.uniform(shake, rows.hidden.shape, minval=-1.0, maxval=1.0) * objective.noise
        rows_in = rows._replace(hidden=rows.hidden + noise)
    else:
        rows_in = rows
    outputs = unroll(net.borrow(params, {"embed": frozen.embed, "head": frozen.head}), spec, rows_in, steps)
    total, right, count, so_far = jnp.zeros(()), [], [], jnp.ones(rows.tokens.shape, bool)
    for step, output in enumerate(outputs):
        mask = supervised_rows(rows, step)
        if spec.own_head:
            mask = mask & inside[ahead(rows.tokens, 2 + step)]
        teacher = jax.lax.stop_gradient(ahead(teacher_rows, 1 + step))
        student = dense(net.scored(params, spec, output), student_head).astype(jnp.float32)
        each = jnp.zeros(mask.shape)
        if objective.token_weight:
            pair = teacher + chosen.log_weight, student + chosen.log_weight
            each = each + objective.token_weight * TOKEN_LOSSES[objective.loss](*pair)
        if objective.feature_weight:
            far = smooth_l1(net.scored(params, spec, output), ahead(rows.hidden, 1 + step))
            each = each + objective.feature_weight * far
        total = total + objective.step_decay**step * normalised(each, mask, objective.normaliser)
        so_far = so_far & (jnp.argmax(student, -1) == jnp.argmax(teacher, -1))
        right.append(jnp.sum(so_far & mask))
        count.append(jnp.sum(mask))
    return total, Agreement(jnp.stack(count), jnp.stack(right))


def candidates_of(
    params: dict[str, Any],
    spec: EagleSpec,
    objective: ObjectiveSpec,
    frozen: Frozen,
    rows: Rows,
    key: jax.Array,
) -> tuple[Candidates, Float[Array, "C D"]]:
    """The tokens that p and q are compared on, and the drafter's head rows for them."""
    V = frozen.head.shape[0]
    if spec.own_head:
        ids = jnp.arange(V, dtype=jnp.int32) if frozen.draft_ids is None else frozen.draft_ids
        return Candidates(ids, jnp.zeros(len(ids))), params["head"]
    if not 0 < objective.candidates < V:
        return whole(V), frozen.head
    chosen = shared_candidates(rows.tokens, frozen.frequent, objective.candidates, key)
    return chosen, frozen.head[chosen.ids]
