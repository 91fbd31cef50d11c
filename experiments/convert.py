"""A drafter from one layout into another: ours, SGLang's, speculators', EAGLE-4's, or the EAGLE-1 reference's.

python -m experiments.convert source=runs/…/drafter to=sglang output=drafter-sglang
python -m experiments.convert source=runs/…/drafter to=eagle4_release retrieval.rank=64 output=drafter-eagle4
python -m experiments.convert source=published to=eagle4 output=drafter 'target_model="hf:owner/model"'

`eagle4` is the folder that this project itself reads, `eagle4_release` the published layout of EAGLE-4, low-rank
factors included. Every export is read back and compared before it appears under its name.
"""

from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from eagle4 import conf
from eagle4.checkpoint import SPEC, Trained, load_drafter, load_factors, save_drafter, save_factors
from eagle4.errors import BadInput
from eagle4.files import whole_folder
from eagle4.interop.candidate_head import CandidateHead
from eagle4.interop.read import Published, read_published
from eagle4.interop.write import for_eagle4, write_eagle4, write_reference, write_sglang, write_speculators
from eagle4.specs import RetrievalSpec
from eagle4.target.hub import fetch
from eagle4.target.load import Checkpoint, load

OURS, RELEASE = "eagle4", "eagle4_release"
LAYOUTS = ("sglang", "speculators", "reference", OURS, RELEASE)


def main(config: DictConfig) -> None:
    for name in ("source", "output"):
        if config[name] is None:
            raise BadInput(f"{name} is missing; give {name}=<folder>")
    if config.to not in LAYOUTS:
        raise BadInput(f"to={config.to} is not known; use one of {', '.join(LAYOUTS)}")
    if config.norm_output not in (None, True, False):
        raise BadInput(f"norm_output must be true, false or null, got {config.norm_output!r}")
    source, output, retrieval = Path(config.source), Path(config.output), conf.build(config.retrieval)
    if config.to == OURS and (source / SPEC).is_file():
        raise BadInput(
            f"{source} is in this project's own layout already; for EAGLE-4's published one give to={RELEASE}"
        )
    model, console = load(fetch(config.target_model)), Console()
    published = read(source, model, config.norm_output)
    verifier = config.verifier or config.target_model.partition(":")[2] or config.target_model
    if config.to == OURS:
        write_ours(output, published, model, verifier)
    elif config.to == RELEASE:
        write_release(output, source, published, model, retrieval)
    else:
        write(output, config.to, published.drafter, model, verifier)
    console.print(f"{output}: {config.to} layout, {published.drafter.spec.fusion}", soft_wrap=True)
    if config.to == OURS and published.drafter.spec.draft_vocab == model.spec.vocab_size:
        console.print(about_factors(output, published, retrieval), soft_wrap=True, markup=False)


def read(folder: Path, model: Checkpoint, norm_output: bool | None) -> Published:
    """One of our own checkpoints (its factors stay where they are), or a published one."""
    if not (folder / SPEC).is_file():
        return read_published(folder, model.spec, norm_output, model.params)
    if norm_output is not None:
        raise BadInput("norm_output is for published drafters; a checkpoint of ours says what it is")
    return Published(load_drafter(folder, model.spec, model.params))


def write(folder: Path, to: str, drafter: Trained, model: Checkpoint, verifier: str) -> None:
    """Write a new folder in the layout `to`."""
    if to == "sglang":
        write_sglang(folder, *drafter, model.spec, model.params)
    elif to == "speculators":
        write_speculators(folder, *drafter, model.spec, model.params, verifier)
    else:
        write_reference(folder, *drafter, model.spec)


def write_ours(folder: Path, published: Published, model: Checkpoint, verifier: str) -> None:
    """Write one of our own checkpoints, with the factors that came along."""
    drafter, factors, head = published
    card = f"# EAGLE drafter\n\nConverted from a published checkpoint, for {verifier}.\n"
    if factors is not None and head is not None:
        card += (
            f"\nIts low-rank factors have rank {head.rank} and are to find {head.candidates} candidates.\n"
        )
    with whole_folder(folder) as temporary:
        save_drafter(temporary, drafter, model.spec, model.params, card)
        again = load_drafter(temporary, model.spec, model.params)
        if factors is not None:
            save_factors(temporary, factors, drafter.params)
            load_factors(temporary, len(factors.down), again.params, again.params["head"])


def write_release(
    folder: Path, source: Path, published: Published, model: Checkpoint, retrieval: RetrievalSpec
) -> None:
    """Write EAGLE-4's published layout with the factors of `retrieval.rank`."""
    if retrieval.selection != "exact":
        raise BadInput(
            f"retrieval.selection={retrieval.selection} can't be exported; EAGLE-4 takes the best by sorting: use exact"
        )
    drafter, factors, _ = published
    whole = for_eagle4(drafter, model.spec, model.params)
    if (source / SPEC).is_file():
        factors = load_factors(source, retrieval.rank, drafter.params, whole.params["head"])
    elif factors is None:
        raise BadInput(
            f"{source} has no low-rank factors; convert it with to={OURS} and make some with experiments.train_head"
        )
    elif len(factors.down) != retrieval.rank:
        raise BadInput(
            f"{source} has no factors of rank {retrieval.rank}; give retrieval.rank={len(factors.down)}, which it has"
        )
    write_eagle4(folder, *whole, model.spec, model.params, factors, retrieval.candidates)


def about_factors(folder: Path, published: Published, retrieval: RetrievalSpec) -> str:
    """How to draft with the factors of an imported head of the whole vocabulary, or how to make some."""
    said = published.head or CandidateHead(retrieval.rank, retrieval.candidates)
    use = f"drafter=eagle4 drafter.checkpoint={folder}"
    if published.factors is not None:
        sizes = f"drafter.retrieval.rank={said.rank} drafter.retrieval.candidates={said.candidates}"
        return f"it has low-rank factors; draft with {use} {sizes}"
    return (
        "it has no low-rank factors; over features from experiments.capture, make some with python -m "
        f"experiments.train_head {use} retrieval.rank={said.rank} retrieval.candidates={said.candidates} "
        "(and head.steps=0 to fit them to the drafter's states without training them)"
    )


if __name__ == "__main__":
    conf.run_app(main, "convert")
