"""Parts that do not fit together are refused in one clear line, before anything is compiled."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from kit import eagle_weights, tiny_params

from eagle4.checkpoint import Trained, load_drafter, save_drafter, save_factors
from eagle4.decode import drafter_of
from eagle4.drafters.eagle_net import complete
from eagle4.errors import BadInput
from eagle4.methods import build_method
from eagle4.policy_spec import PolicySpec
from eagle4.retrieval.factors import truncated
from eagle4.specs import DrafterSpec, EagleSpec, ModelSpec, RetrievalSpec, SamplingSpec, System, TreeSpec

MODEL = ModelSpec("llama", 16, 16, 16, 1, 2, 1, 8, 64)
LOOKUP = DrafterSpec("prompt_lookup")


def build(drafter=LOOKUP, tree=None, policy=None, verifier="point_mass", temperature=1.0, params=None):
    tree, policy = tree or TreeSpec(), policy or PolicySpec()
    sampling = SamplingSpec(temperature=temperature)
    return build_method("mine", drafter, tree, policy, verifier, MODEL, sampling, params or {"embed": None})


def test_a_method_holds_what_it_was_built_from():
    method = build(policy=PolicySpec(depth=2, nodes=3))
    assert (method.name, method.policy.depth, method.params.target) == ("mine", 2, {"embed": None})
    assert (method.system.model, method.system.drafter, method.system.tree) == (MODEL, LOOKUP, TreeSpec())
    assert method.system.verifier == "point_mass"
    assert build(temperature=0.0).system.verifier == "greedy"
    assert hash(method.system) == hash(build(policy=PolicySpec(depth=1)).system), "policy numbers are data"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"drafter": DrafterSpec("prompt_lokup")}, "drafter.name 'prompt_lokup' is not known; use one of"),
        ({"policy": PolicySpec("fixd")}, "policy.name 'fixd' is not known; use one of fixed"),
        ({"verifier": "point"}, "verifier 'point' is not known; use one of greedy, point_mass"),
        ({"verifier": "greedy"}, "verifier 'greedy' does not go with sampling.temperature 1.0"),
        (
            {"policy": PolicySpec(depth=5)},
            "policy.depth=5 is outside the tree envelope; raise tree.depth from 4",
        ),
        ({"policy": PolicySpec(width=2)}, "policy.width=2 is outside the tree envelope; raise tree.width"),
        ({"policy": PolicySpec(children=2)}, "policy.children=2 is outside the tree envelope"),
        (
            {"policy": PolicySpec(nodes=6)},
            "policy.nodes=6 is outside the tree envelope; raise tree.nodes from 5",
        ),
        ({"policy": PolicySpec(depth=-1)}, "policy.depth=-1 is negative; 0 means tree.depth"),
        ({"tree": TreeSpec("static", 1, nodes=2, paths=((0, 1),))}, "(0, 1)"),
        ({"tree": TreeSpec("static", 1, nodes=2, paths=((-1,),))}, "-1"),
        ({"drafter": DrafterSpec("prompt_lookup", matches=2)}, "drafter.matches=2 branches from the root"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(parts, said):
    with pytest.raises(BadInput) as caught:
        build(**parts)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_matches_up_to_the_children_of_the_tree_are_fine():
    tree = TreeSpec(depth=3, nodes=7, children=3)
    assert build(DrafterSpec("prompt_lookup", matches=3), tree).system.drafter.matches == 3
    assert build(DrafterSpec("none", matches=9), TreeSpec(depth=0, nodes=1)).system.tree.depth == 0


def saved(folder, spec: EagleSpec):
    """The complete spec and the weights of a drafter in `folder`, and the target it was made for."""
    target, whole = tiny_params(MODEL), complete(spec, MODEL)
    own = eagle_weights(whole, MODEL)
    save_drafter(folder, Trained(whole, own), MODEL, target, "A card.")
    return whole, own, target


@pytest.mark.parametrize(
    ("spec", "borrowed"),
    [
        (EagleSpec("concat2"), {"embed", "head"}),
        (EagleSpec(taps=(0, 1), fc_norm=True, norm_output=True), {"embed", "head"}),
        (EagleSpec(taps=(1,), draft_vocab=5), {"embed"}),
    ],
)
def test_a_trained_drafter_comes_from_its_checkpoint(tmp_path, spec, borrowed):
    """Its spec is the checkpoint's, whatever the config says; embedding and head are the target's own arrays."""
    whole, own, target = saved(tmp_path, spec)
    drafter = DrafterSpec("eagle", checkpoint=str(tmp_path), eagle=EagleSpec(window=3))
    method = build(drafter, TreeSpec("dynamic", 2, 2, 2, 6), params=target)
    assert method.system.drafter == DrafterSpec("eagle", checkpoint=str(tmp_path), eagle=whole)
    assert method.system.taps == spec.taps
    assert method.params.target is target
    network = method.params.drafter
    assert {name for name in ("embed", "head") if network[name] is target[name]} == borrowed
    for name in own:
        for mine, saved_one in zip(jax.tree.leaves(network[name]), jax.tree.leaves(own[name]), strict=True):
            np.testing.assert_allclose(mine, saved_one, rtol=2**-8)
    assert network.keys() == own.keys() | borrowed


def test_a_trained_drafter_scores_with_the_embedding_of_a_tied_target(tmp_path):
    tied = replace(MODEL, tie_embeddings=True)
    target = tiny_params(MODEL)
    target = {name: target[name] for name in target if name != "head"}
    whole = complete(EagleSpec("concat2"), tied)
    save_drafter(tmp_path, Trained(whole, eagle_weights(whole, tied)), tied, target, "A card.")
    drafter = DrafterSpec("eagle", checkpoint=str(tmp_path))
    method = build_method("m", drafter, TreeSpec(), PolicySpec(), "greedy", tied, SamplingSpec(), target)
    assert method.params.drafter["head"] is target["embed"]


def test_a_missing_or_foreign_checkpoint_is_one_clear_line(tmp_path):
    target = tiny_params(MODEL)
    for folder, said in (
        (None, "drafter.name=eagle needs a trained network; give drafter.checkpoint=<folder>"),
        (tmp_path, "is not a drafter checkpoint: it has no spec.json"),
        (tmp_path / "nowhere", "is not a drafter checkpoint: it has no spec.json"),
    ):
        checkpoint = None if folder is None else str(folder)
        with pytest.raises(BadInput) as caught:
            build(DrafterSpec("eagle", checkpoint=checkpoint, eagle=EagleSpec()), params=target)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_verifiers_of_draws_go_with_drawn_trees_of_a_trained_drafter(tmp_path):
    _, _, target = saved(tmp_path, EagleSpec("concat2"))
    drafter = DrafterSpec("eagle", checkpoint=str(tmp_path))
    sampled = TreeSpec("sampled", 2, 2, 2, 6)
    assert build(drafter, sampled, verifier="rejection", params=target).system.verifier == "rejection"
    with pytest.raises(BadInput, match="needs children drawn from the drafter"):
        build(drafter, TreeSpec("dynamic", 2, 2, 2, 6), verifier="rejection", params=target)


def test_low_rank_factors_come_from_the_checkpoint_and_search_the_whole_vocabulary(tmp_path):
    """A list of frequent tokens plays no part then: the shortlist is found among all."""
    spec = EagleSpec(taps=(0, 1), fc_norm=True, norm_output=True, draft_vocab=5, target_rows=True)
    whole, _, target = saved(tmp_path, spec)
    own = load_drafter(tmp_path, MODEL, target).params
    made = truncated(np.asarray(target["head"]), 4)
    save_factors(tmp_path, made, own)
    drafter = DrafterSpec("eagle", checkpoint=str(tmp_path), retrieval=RetrievalSpec(4, 6))
    method = build(drafter, TreeSpec("dynamic", 2, 2, 2, 6), params=target)
    assert method.system.drafter.eagle == replace(whole, draft_vocab=0, target_rows=False)
    assert method.params.drafter["head"] is target["head"]
    for mine, stored in zip(method.params.drafter["factors"], made):
        np.testing.assert_allclose(mine, stored, rtol=2**-8)


def test_factors_that_do_not_fit_are_named(tmp_path):
    _, _, target = saved(tmp_path, EagleSpec(taps=(0, 1)))
    own = load_drafter(tmp_path, MODEL, target).params
    head = np.asarray(target["head"])

    def refusal(retrieval) -> str:
        drafter = DrafterSpec("eagle", checkpoint=str(tmp_path), retrieval=retrieval)
        with pytest.raises(BadInput) as caught:
            build(drafter, TreeSpec("dynamic", 2, 2, 2, 6), params=target)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has no factors of rank 4 (it has none at all); train them" in refusal(RetrievalSpec(4, 6))
    path = save_factors(tmp_path, truncated(head, 4), own)
    assert "has no factors of rank 3 (it has ranks 4)" in refusal(RetrievalSpec(3, 6))
    assert "retrieval.candidates=17 is more than the 16 tokens there are" in refusal(RetrievalSpec(4, 17))
    save_factors(tmp_path, truncated(head[:, :15], 4), own)
    assert "down has shape [4, 15], the spec says [4, 16]" in refusal(RetrievalSpec(4, 6))
    save_factors(tmp_path, truncated(head, 4), own | {"fc": own["fc"] + 1})
    assert "holds factors of another drafter; train them again" in refusal(RetrievalSpec(4, 6))
    path.write_bytes(path.read_bytes()[:100])
    assert "is cut or damaged" in refusal(RetrievalSpec(4, 6))


def test_an_own_reduced_head_has_no_rows_to_search():
    spec = complete(EagleSpec(taps=(0, 1), draft_vocab=5), MODEL)
    system = System(
        MODEL, DrafterSpec("eagle", eagle=spec, retrieval=RetrievalSpec(4, 6)), TreeSpec(), taps=(0, 1)
    )
    with pytest.raises(BadInput, match=r"searches the whole vocabulary; it does not go with a reduced head"):
        drafter_of(system)
