"""Parts that do not fit together are refused in one clear line, before anything is compiled."""

import pytest

from eagle4.errors import BadInput
from eagle4.methods import build_method
from eagle4.specs import DrafterSpec, ModelSpec, PolicySpec, SamplingSpec, TreeSpec

MODEL = ModelSpec("llama", 16, 16, 16, 1, 2, 1, 8, 64)
LOOKUP = DrafterSpec("prompt_lookup")


def build(drafter=LOOKUP, tree=None, policy=None, verifier="point_mass", temperature=1.0):
    tree, policy = tree or TreeSpec(), policy or PolicySpec()
    sampling = SamplingSpec(temperature=temperature)
    return build_method("mine", drafter, tree, policy, verifier, MODEL, sampling, {"embed": None})


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
