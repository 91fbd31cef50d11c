"""One optimiser step on a drafter's parameters, and the schedule behind it. Pure; `train.step` compiles it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, UInt32

from eagle4.specs import EagleSpec
from eagle4.train.objective import Agreement, Frozen, loss_and_agreement
from eagle4.train.spec import ObjectiveSpec, TrainSpec
from eagle4.train.unroll import Rows


@struct.dataclass
class TrainState:
    """What a resumed run needs besides its place in the data: float32 drafter parameters, optimiser, step, key.

    The target's weights are not in here, so no optimiser can change them.
    """

    params: Any
    opt_state: Any
    step: Int32[Array, ""]
    key: UInt32[Array, " 2"]


class Report(NamedTuple):
    """One step: loss, gradient norm before clipping, agreement by unrolled step, and whether all was finite."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    agreement: Agreement
    finite: Bool[Array, ""]


def schedule(train: TrainSpec) -> optax.Schedule:
    """Learning rate by step: each phase warms up and then falls along a cosine."""
    phases, ends = [], []
    for phase in train.phases:
        warm = min(max(1, round(train.warmup * phase.steps)), phase.steps - 1) if phase.steps > 1 else 0
        phases.append(
            optax.warmup_cosine_decay_schedule(
                phase.lr / (warm + 1), phase.lr, warm, max(phase.steps, 1), train.final_lr * phase.lr
            )
        )
        ends.append(phase.steps + (ends[-1] if ends else 0))
    return optax.join_schedules(phases, ends[:-1])


def optimiser(train: TrainSpec) -> optax.GradientTransformation:
    """AdamW with clipping by global norm; norms and biases are not decayed, and rows may be accumulated."""
    chain = optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(
            schedule(train),
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )
    if train.accumulate == 1:
        return chain
    return optax.MultiSteps(chain, train.accumulate).gradient_transformation()


def begin(train: TrainSpec, params: Any) -> TrainState:
    """The state before the first step."""
    return TrainState(
        params, optimiser(train).init(params), jnp.int32(0), jax.random.key_data(jax.random.key(train.seed))
    )


def update(
    spec: EagleSpec, train: TrainSpec, steps: int, state: TrainState, frozen: Frozen, rows: Rows
) -> tuple[TrainState, Report]:
    """One batch: loss over `steps` unrolled steps, gradients, AdamW. A batch that isn't finite changes no parameter.

    `state.step` counts batches, so with accumulation an optimiser step takes several.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    rows = as_float(rows)
    (loss, agreement), grads = jax.value_and_grad(loss_and_agreement, has_aux=True)(
        state.params, spec, train.objective, frozen, rows, steps, key
    )
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    updates, opt_state = optimiser(train).update(grads, state.opt_state, state.params)
    fresh = optax.apply_updates(state.params, updates), opt_state
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), fresh, (state.params, state.opt_state)
    )
    return TrainState(params, opt_state, state.step + 1, state.key), Report(loss, norm, agreement, finite)


def evaluate(
    params: Any, spec: EagleSpec, frozen: Frozen, rows: Rows, steps: int
) -> tuple[Float[Array, ""], Agreement]:
    """KL over the whole vocabulary and agreement of `steps` unrolled steps, without noise or sampling."""
    objective = ObjectiveSpec(loss="kl", candidates=0, step_decay=1.0)
    return loss_and_agreement(params, spec, objective, frozen, as_float(rows), steps, jax.random.key(0))


def as_float(rows: Rows) -> Rows:
    """Stored bfloat16 as float32."""
    return rows._replace(features=rows.features.astype(jnp.float32), hidden=rows.hidden.astype(jnp.float32))
