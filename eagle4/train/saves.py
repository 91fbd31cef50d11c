"""Orbax checkpoints of a training run: parameters, optimiser, step and key, the place in the data, and what it was.

Restored against an abstract state, so optimiser tuples keep their types and any device layout will do.
"""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from eagle4.errors import BadInput
from eagle4.train.optimise import TrainState


def open_saves(folder: Path | str, keep: int = 2) -> ocp.CheckpointManager:
    """The run's checkpoints; the last `keep` stay. Writes are atomic: an interrupted one is not seen."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def save(
    manager: ocp.CheckpointManager, state: TrainState, data: dict[str, Any], about: dict[str, Any]
) -> None:
    """Write the state after a step, with the loader's position and a description of the run."""
    step = int(state.step)
    if step in manager.all_steps():
        return
    try:
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
                run=ocp.args.JsonSave({"data": data, "about": about}),  # pyright: ignore[reportCallIssue]
            ),
        )
    except OSError as error:
        raise BadInput(
            f"can't write the checkpoint of step {step}: {error}; earlier ones are kept"
        ) from error


def restore(
    manager: ocp.CheckpointManager, like: TrainState, about: dict[str, Any]
) -> tuple[TrainState, dict[str, Any]] | None:
    """The last checkpoint and the loader's position, or None for a fresh run.

    Raises BadInput when it belongs to a run of another description, naming what differs.
    """
    step = manager.latest_step()
    if step is None:
        return None
    found = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]  # pyright: ignore
    now = json.loads(json.dumps(about))
    if found["about"] != now:
        odd = ", ".join(k for k in sorted({*now, *found["about"]}) if now.get(k) != found["about"].get(k))
        raise BadInput(
            f"{manager.directory} holds a run with another {odd}; choose another folder, or remove it to start anew"
        )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    restored = manager.restore(
        step,
        args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)),  # pyright: ignore[reportCallIssue]
    )
    return restored["state"], found["data"]
