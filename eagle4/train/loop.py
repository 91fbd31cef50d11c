"""The training loop: batches in, records out; stops and goes on at any step with the same numbers."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle4 import metrics
from eagle4.checkpoint import Trained
from eagle4.errors import BadInput
from eagle4.specs import EagleSpec, ModelSpec
from eagle4.train import optimise, saves
from eagle4.train.batches import Batch, held_out, training
from eagle4.train.features import FeatureStore, read, size
from eagle4.train.objective import Frozen
from eagle4.train.optimise import Report, TrainState
from eagle4.train.spec import TrainSpec
from eagle4.train.step import jit_evaluate, jit_update
from eagle4.train.trial import trial_tau
from eagle4.train.unroll import Rows

MOST_BAD = 10


class Setup(NamedTuple):
    """What a run works on. `start` are the drafter's float32 parameters before the first step."""

    spec: EagleSpec
    train: TrainSpec
    target: ModelSpec
    target_params: dict[str, Any]
    frozen: Frozen
    store: FeatureStore
    start: dict[str, Any]
    trial_prompts: list[list[int]]
    stop_ids: tuple[int, ...]


def run(setup: Setup, folder: str) -> Iterator[tuple[dict[str, Any], TrainState]]:
    """Train to the end, yielding (record, state) every `log_every` batches, after validations and at the end.

    Goes on from the last checkpoint in `folder`. A batch that isn't finite changes nothing; its documents are named in
    a record, and more than `MOST_BAD` of them end the run.
    """
    train, about = setup.train, description(setup)
    manager = saves.open_saves(folder)
    data = training(setup.store, train.length, train.batch, train.seed, train.share)
    state = optimise.begin(train, jax.tree.map(np.asarray, setup.start))
    if (found := saves.restore(manager, state, about)) is not None:
        state, position = found
        data.set_state(position)
    state = jax.tree.map(jax.numpy.asarray, state)
    bad, tokens, spent, step = 0, 0, 0.0, int(state.step)
    while step < train.batches:
        begun = time.perf_counter()
        batch = next(data)
        steps = train.phases[train.phase_at(step // train.accumulate)].unroll
        rows = supervised(rows_of(batch), train)
        state, report = jit_update(setup.spec, train, steps, state, setup.frozen, rows)
        if not bool(report.finite):
            bad += 1
            yield {"step": step + 1, "train/not_finite": reject(setup, batch, bad)}, state
        spent += time.perf_counter() - begun
        step += 1
        tokens += int((batch.segment > 0).sum())
        due = looks(train, step)
        if due.save:
            saves.save(manager, state, data.get_state(), about)
        if due.log or due.validate or due.decode:
            record = trained(report, step, train, tokens, spent)
            record |= validation(setup, state, max(p.unroll for p in train.phases)) if due.validate else {}
            record |= decoded(setup, state) if due.decode else {}
            yield record, state
    manager.close()


def description(setup: Setup) -> dict[str, Any]:
    """What a run is: two runs of one description give the same numbers, so one can go on from the other."""
    return {
        "eagle": dataclasses.asdict(setup.spec),
        "train": dataclasses.asdict(setup.train),
        "target": dataclasses.asdict(setup.target),
        "features": setup.store.fingerprint._asdict(),
        "documents": size(setup.store),  # the loader's place means nothing in a store that has grown
    }


def reject(setup: Setup, batch: Batch, bad: int) -> list[str]:
    """Names of the documents of a batch that isn't finite. Raises BadInput if there were too many such batches."""
    names = names_of(setup.store, batch)
    if bad > MOST_BAD:
        raise BadInput(
            f"more than {MOST_BAD} batches were not finite, the last one with {', '.join(names[:4])}; lower the "
            "learning rate or look at its features"
        )
    return names


class Looks(NamedTuple):
    """What is due after a batch."""

    log: bool
    validate: bool
    decode: bool
    save: bool


def looks(train: TrainSpec, step: int) -> Looks:
    """Due every so many batches and after the last one; an interval of 0 is never due."""
    last = step == train.batches

    def due(every: int) -> bool:
        return every > 0 and (last or step % every == 0)

    validate = train.validate_every if train.validate_tokens else 0
    return Looks(due(train.log_every), due(validate), due(train.decode_every), due(train.save_every))


def rows_of(batch: Batch) -> Rows:
    """A batch as training reads it."""
    return Rows(*(getattr(batch, name) for name in Rows._fields))


def supervised(rows: Rows, train: TrainSpec) -> Rows:
    """The rows with what is to be learned marked: answers, or all real tokens."""
    return rows._replace(supervised=rows.segment > 0) if train.learn_prompts else rows


def names_of(store: FeatureStore, batch: Batch) -> list[str]:
    """Names of the documents in a batch."""
    found = sorted({int(i) for i in np.unique(batch.document[batch.segment > 0])})
    return [read(store, i).name for i in found]


def trained(report: Report, step: int, train: TrainSpec, tokens: int, seconds: float) -> dict[str, Any]:
    """The record of a training step."""
    agreement = np.asarray(report.agreement.right) / np.maximum(np.asarray(report.agreement.rows), 1)
    return {
        "step": step,
        "time_s": seconds,
        "train/loss": float(report.loss),
        "train/grad_norm": float(report.grad_norm),
        "train/lr": float(jax.numpy.asarray(optimise.schedule(train)(step // train.accumulate))),
        "train/tokens_per_s": tokens / max(seconds, 1e-9),
        **{f"train/joint_{j}": float(a) for j, a in enumerate(agreement)},
    }


def validation(setup: Setup, state: TrainState, steps: int) -> dict[str, Any]:
    """Loss and agreement on held-out documents over the whole vocabulary, and the acceptance length it predicts."""
    seen, losses, parts = 0, [], []
    for batch in held_out(setup.store, setup.train.length, setup.train.batch):
        loss, agreement = jit_evaluate(state.params, setup.spec, setup.frozen, rows_of(batch), steps)
        losses.append(float(loss))
        parts.append(agreement)
        seen += int((batch.segment > 0).sum())
        if seen >= setup.train.validate_tokens:
            break
    if not parts:
        raise BadInput(
            "the feature store has no held-out documents; capture more, or set train.validate_tokens=0"
        )
    total = jax.tree.map(lambda *a: sum(a), *parts)
    joint = np.asarray(total.right) / np.maximum(np.asarray(total.rows), 1)
    return {
        "validate/kl": float(np.mean(losses)),
        "validate/tau_sim": metrics.tau_from_joint(joint),
        **{f"validate/joint_{j}": float(a) for j, a in enumerate(joint)},
    }


def decoded(setup: Setup, state: TrainState) -> dict[str, Any]:
    """Acceptance length of a real decode on held-out prompts."""
    if not setup.trial_prompts:
        return {}
    parts = setup.spec, result(setup, state).params, setup.target, setup.target_params
    return {"decode/tau": trial_tau(*parts, setup.trial_prompts, setup.stop_ids)}


def result(setup: Setup, state: TrainState) -> Trained:
    """The trained drafter."""
    params = dict(state.params)
    if setup.frozen.draft_ids is not None:
        params["draft_ids"] = setup.frozen.draft_ids
    return Trained(setup.spec, params)
