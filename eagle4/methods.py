"""A method is a named choice of drafter, tree, policy and verifier, checked against the model it runs on."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from eagle4 import decode
from eagle4.calibration import load_reliability
from eagle4.checkpoint import load_drafter, load_factors
from eagle4.decode import Params
from eagle4.drafters import DRAFTERS, eagle_net
from eagle4.errors import BadInput
from eagle4.harness.policies import POLICIES
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, ModelSpec, RetrievalSpec, SamplingSpec, System, TreeSpec
from eagle4.tree.presets import from_rank_paths
from eagle4.verify import VERIFIERS


class Method(NamedTuple):
    """Everything one method needs to decode."""

    name: str
    system: System
    policy: PolicySpec
    params: Params


def build_method(
    name: str,
    drafter: DrafterSpec,
    tree: TreeSpec,
    policy: PolicySpec,
    verifier: str,
    model: ModelSpec,
    sampling: SamplingSpec,
    params: Any,
) -> Method:
    """Check that the parts fit together and put them into a System. At temperature 0 every method verifies greedily.

    `params` are the target's; a trained drafter's are read from its checkpoint. Raises BadInput naming the part that
    does not fit.
    """
    _known("drafter.name", drafter.name, DRAFTERS)
    _known("policy.name", policy.name, POLICIES)
    _known("verifier", verifier, VERIFIERS)
    check_envelope(tree, policy)
    policy = calibrated(policy, drafter)
    if tree.kind == "static":
        from_rank_paths(tree.paths)
    if drafter.name == "bigram":
        raise BadInput(
            "drafter.name 'bigram' needs a table, which no method has; experiments.tree_cost makes one"
        )
    if drafter.name == "prompt_lookup":
        _check_copies(drafter, tree)
    network, taps = None, ()
    if drafter.name == "eagle":
        drafter, network = _with_network(drafter, model, params)
        assert drafter.eagle is not None
        taps = drafter.eagle.taps
    drawn = VERIFIERS[verifier].drafting != "any"
    if drawn and not sampling.greedy and tree.kind != "sampled":
        raise BadInput(
            f"verifier {verifier!r} needs children drawn from the drafter, and tree.kind={tree.kind} takes its picks; "
            "use verifier=point_mass, or tree=sampled with a drafter that has probabilities"
        )
    system = System(
        model=model,
        drafter=drafter,
        tree=tree,
        policy=policy.name,
        verifier="greedy" if sampling.greedy else verifier,
        sampling=sampling,
        taps=taps,
    )
    decode.drafter_of(system)
    return Method(name, system, policy, Params(params, network))


def with_head(drafter: DrafterSpec, head: str) -> DrafterSpec:
    """The drafter with the head of this name: own (the checkpoint's), full (the whole vocabulary), or
    r<rank>c<candidates> (retrieval)."""
    found = re.fullmatch(r"r(\d+)c(\d+)", head)
    if head not in ("own", "full") and not found:
        raise BadInput(f"head {head!r} is not known; use own, full, or r<rank>c<candidates> like r64c256")
    retrieval = RetrievalSpec(int(found[1]), int(found[2])) if found else None
    return replace(drafter, retrieval=retrieval, full_head=head == "full")


def calibrated(policy: PolicySpec, drafter: DrafterSpec) -> PolicySpec:
    """The policy with what `policy.calibration` names: a file, or own: the checkpoint's, if it has one."""
    path = policy.calibration
    if path == "own":
        own = None if drafter.checkpoint is None else Path(drafter.checkpoint) / "calibration.json"
        path = own if own is not None and own.is_file() else None
    return policy if path is None else replace(policy, reliability=load_reliability(path))


def check_envelope(tree: TreeSpec, policy: PolicySpec) -> None:
    """Raises BadInput for a policy that asks for more than its tree can hold."""
    for field in ("depth", "width", "children", "nodes"):
        most, wanted = getattr(tree, field), getattr(policy, field)
        if wanted < 0:
            raise BadInput(f"policy.{field}={wanted} is negative; 0 means tree.{field}")
        if wanted > most:
            raise BadInput(
                f"policy.{field}={wanted} is outside the tree envelope; raise tree.{field} from {most}"
            )


def _with_network(drafter: DrafterSpec, model: ModelSpec, params: Any) -> tuple[DrafterSpec, Any]:
    """The drafter as its checkpoint says it is, and its weights beside the target's embedding and head."""
    if drafter.checkpoint is None:
        raise BadInput("drafter.name=eagle needs a trained network; give drafter.checkpoint=<folder>")
    trained = load_drafter(drafter.checkpoint, model, params)
    spec, own, retrieval = trained.spec, trained.params, drafter.retrieval
    if drafter.full_head and spec.own_head:
        raise BadInput(
            "drafter.full_head needs a checkpoint that scores with the target's rows, not a head of its own"
        )
    if spec.target_rows and (drafter.full_head or retrieval):
        # The whole vocabulary is scored or searched: a list of frequent tokens plays no part.
        spec = replace(spec, draft_vocab=0, target_rows=False)
        own = {name: value for name, value in own.items() if name != "draft_ids"}
    if retrieval is None:
        return replace(drafter, eagle=spec), eagle_net.borrow(own, params)
    network = eagle_net.borrow(own, params)
    head = network["head"]
    if retrieval.candidates > head.shape[0]:
        raise BadInput(
            f"retrieval.candidates={retrieval.candidates} is more than the {head.shape[0]} tokens there are"
        )
    factors = load_factors(drafter.checkpoint, retrieval.rank, trained.params, head)
    return replace(drafter, eagle=spec), {**network, "factors": factors}


def _check_copies(drafter: DrafterSpec, tree: TreeSpec) -> None:
    """Copied text has no probabilities and a shape of its own: one chain a match."""
    if tree.kind not in ("chain", "dynamic"):
        raise BadInput(
            f"prompt lookup copies chains and can't fill tree.kind={tree.kind}; use tree=chain or matches"
        )
    if drafter.matches > tree.children:
        raise BadInput(
            f"drafter.matches={drafter.matches} branches from the root, but tree.children={tree.children}; "
            f"use tree=matches tree.children={drafter.matches}"
        )


def _known(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise BadInput(f"{what} {name!r} is not known; use one of {', '.join(known)}")
