"""A batch decoded together gives each request's own greedy text, and its figures add up."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from kit import TINY, plain_greedy, prompts, tiny_params

from eagle4.decode import Params
from eagle4.errors import BadInput
from eagle4.harness import costs
from eagle4.load_cost import decode_batch, summary
from eagle4.methods import Method, build_method
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, SamplingSpec, TreeSpec

WORDS = SimpleNamespace(stop_ids=())
TEXTS = prompts((6, 11, 3), seed=4)
NEW = 12


def lookup(table=None) -> Method:
    drafter, tree = DrafterSpec("prompt_lookup", min_ngram=1), TreeSpec("chain", 3, 1, 1, 4, buckets=(4,))
    method = build_method(
        "lookup", drafter, tree, PolicySpec(), "point_mass", TINY, SamplingSpec(), tiny_params()
    )
    return method._replace(params=Params(tiny_params(), None, table))


def test_every_row_is_plain_decodings_and_the_figures_add_up():
    part = costs.grid([1, 3], [64], [1, 4], [[[1.0, 2.0]], [[3.0, 7.0]]])
    method = lookup(costs.CostTable(part, costs.free(), costs.free()))
    run = decode_batch(method, WORDS, TEXTS, [0, 1, 2], NEW, 128)
    assert run.ids == [plain_greedy(tiny_params(), TINY, text, NEW) for text in TEXTS]
    figures = summary([run, run._replace(decode_s=3 * run.decode_s)])
    assert figures["tokens_per_s"] == pytest.approx(2 * 3 * (NEW - 1) / (4 * run.decode_s))
    active = run.rounds.active
    assert figures["tau"] == pytest.approx(1 + run.rounds.num_accepted[active].mean())
    assert figures["nodes"] == 4
    assert figures["levels"] == 0
    # Three rows cost 7 ms with 4 nodes; fewer active ones are priced between.
    wanted = [np.interp(n, [1, 3], [2, 7]) for n in active.sum(1)]
    assert figures["predicted_ms"] == pytest.approx(np.mean(wanted), rel=1e-5)


def test_without_a_table_nothing_is_predicted():
    run = decode_batch(lookup(), WORDS, TEXTS[:1], [0], NEW, 128)
    assert summary([run])["predicted_ms"] is None
    assert jnp.isnan(run.rounds.predicted_ms).all()


def test_an_empty_batch_is_refused():
    with pytest.raises(BadInput, match="empty batch"):
        decode_batch(lookup(), WORDS, [], [], NEW, 128)
