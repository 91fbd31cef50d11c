"""A closed loop answers every request as if it were alone, whatever its neighbours and the refill order."""

import numpy as np
import pytest
from kit import TINY, chain_system, plain_greedy, prompts, run, tiny_params

from eagle4 import serve as serving
from eagle4.decode import Params
from eagle4.errors import BadInput
from eagle4.policy_spec import PolicySpec
from eagle4.serve import Request, Shape, serve

SHAPE = Shape(batch=3, capacity=192, refill=2, stretch=3)
TEXTS = prompts((5, 70, 3, 9, 1, 12, 30))
NEW = (8, 3, 1, 12, 5, 2, 9)


def serve_all(system, shape=SHAPE, stop_ids=()):
    requests = (Request(f"r{i}", t, i, n) for i, (t, n) in enumerate(zip(TEXTS, NEW)))
    served = list(serve(system, Params(tiny_params()), PolicySpec(), requests, shape, stop_ids))
    assert sorted(s.request.name for s in served) == [f"r{i}" for i in range(len(TEXTS))]
    return {s.request.seed: s.ids for s in served}


@pytest.mark.parametrize("name", ["none", "prompt_lookup"])
def test_greedy_answers_equal_the_plain_decoder(name):
    expected = [plain_greedy(tiny_params(), TINY, t, n) for t, n in zip(TEXTS, NEW)]
    served = serve_all(chain_system(name))
    assert [served[i] for i in range(len(TEXTS))] == expected


def test_sampled_answers_do_not_depend_on_the_batch():
    system = chain_system("none", temperature=1.0)
    served = serve_all(system)
    for i in (0, 3, 6):
        alone, _, _ = run(system, Params(tiny_params()), [TEXTS[i]], NEW[i], most=12, seeds=np.array([i]))
        assert served[i] == alone[0]
    assert serve_all(system, Shape(batch=2, capacity=192, refill=2, stretch=5)) == served


def test_only_full_groups_are_prefilled_while_there_are_requests(monkeypatch):
    sizes, whole = [], serving.prefill_group
    monkeypatch.setattr(
        serving,
        "prefill_group",
        lambda s, p, q, group, *rest: sizes.append(len(group)) or whole(s, p, q, group, *rest),
    )
    serve_all(chain_system("none"))
    assert sizes == [2, 2, 2, 1]


def test_stop_ids_end_rows_early():
    stop = plain_greedy(tiny_params(), TINY, TEXTS[0], 4)[3]
    for i, ids in serve_all(chain_system("none"), stop_ids=(stop,)).items():
        full = plain_greedy(tiny_params(), TINY, TEXTS[i], NEW[i])
        assert ids == (full[: full.index(stop) + 1] if stop in full else full)


def test_a_request_without_room_is_refused():
    requests = [Request("long", [1] * 150, 0, 100)]
    with pytest.raises(BadInput, match="cache slots"):
        list(serve(chain_system("none"), Params(tiny_params()), PolicySpec(), requests, SHAPE))
