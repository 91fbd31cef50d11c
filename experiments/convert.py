"""A drafter from one layout into another: ours, SGLang's, speculators', or the EAGLE-1 reference's.

python -m experiments.convert source=runs/…/drafter to=sglang output=drafter-sglang
python -m experiments.convert source=published to=eagle4 output=drafter 'target_model="hf:owner/model"'

Every export is read back and compared before it appears under its name.
"""

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from eagle4 import conf
from eagle4.checkpoint import SPEC, Trained, load_drafter, save_drafter
from eagle4.errors import BadInput
from eagle4.files import whole_folder
from eagle4.interop.read import read_drafter
from eagle4.interop.write import write_reference, write_sglang, write_speculators
from eagle4.target.hub import fetch
from eagle4.target.load import Checkpoint, load

LAYOUTS = ("sglang", "speculators", "reference", "eagle4")


def main(config: DictConfig) -> None:
    for name in ("source", "output"):
        if config[name] is None:
            raise BadInput(f"{name} is missing; give {name}=<folder>")
    if config.to not in LAYOUTS:
        raise BadInput(f"to={config.to} is not known; use one of {', '.join(LAYOUTS)}")
    if config.norm_output not in (None, True, False):
        raise BadInput(f"norm_output must be true, false or null, got {config.norm_output!r}")
    model = load(fetch(config.target_model))
    drafter = read(Path(config.source), model, config.norm_output)
    verifier = config.verifier or config.target_model.partition(":")[2] or config.target_model
    write(Path(config.output), config.to, drafter, model, verifier)
    Console().print(f"{config.output}: {config.to} layout, {drafter.spec.fusion}", soft_wrap=True)


def read(folder: Path, model: Checkpoint, norm_output: bool | None) -> Trained:
    """One of our own checkpoints, or a published one."""
    if not (folder / SPEC).is_file():
        return read_drafter(folder, model.spec, norm_output, model.params)
    if norm_output is not None:
        raise BadInput("norm_output is for published drafters; a checkpoint of ours says what it is")
    return load_drafter(folder, model.spec, model.params)


def write(folder: Path, to: str, drafter: Trained, model: Checkpoint, verifier: str) -> None:
    """Write a new folder in the layout `to`."""
    if to == "sglang":
        write_sglang(folder, *drafter, model.spec, model.params)
    elif to == "speculators":
        write_speculators(folder, *drafter, model.spec, model.params, verifier)
    elif to == "reference":
        write_reference(folder, *drafter, model.spec)
    else:
        card = f"# EAGLE drafter\n\nConverted from a published checkpoint, for {verifier}.\n"
        with whole_folder(folder) as temporary:
            save_drafter(temporary, drafter, model.spec, model.params, card)
            load_drafter(temporary, model.spec, model.params)


if __name__ == "__main__":
    conf.run_app(main, "convert")
