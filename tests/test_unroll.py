"""Training-time test sees what a draft step sees: masks drawn by hand, and outputs equal to real drafting."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import TINY, tiny_params

from eagle4.drafters import eagle, eagle_net
from eagle4.nn.abstract import initialise
from eagle4.specs import EagleSpec, TreeSpec
from eagle4.target import model as target
from eagle4.train import unroll as ttt
from eagle4.train.unroll import Rows, diagonal_attention, earlier_rows, supervised_rows, unroll
from eagle4.tree.grow import Frontier
from eagle4.types import Commit

SPECS = {
    "eagle1": EagleSpec("concat2"),
    "eagle3": EagleSpec("taps", taps=(0, 1, 2)),
    "eagle3.1": EagleSpec("taps", taps=(0, 1, 2), fc_norm=True, norm_output=True),
    "window": EagleSpec("taps", taps=(0, 1, 2), norm_before_fc=True, norm_before_residual=True, window=4),
}
TEXT = np.array([5, 9, 2, 40, 7, 7, 31, 12, 3, 18, 25, 6], np.int32)
STEPS = 3


def network(spec):
    spec = eagle_net.complete(spec, TINY)
    own = initialise(eagle_net.abstract(spec, TINY), jax.random.key(3))
    return spec, eagle_net.borrow(own, tiny_params())


def features_of(tokens, taps):
    """Features and final hidden states of one text, as the target sees it alone, and of padding up to one length."""
    size = len(TEXT)
    at = jnp.arange(size, dtype=jnp.int32)[None]
    causal = jnp.tril(jnp.ones((1, size, size), bool))
    padded = jnp.asarray(np.pad(tokens, (0, size - len(tokens))))
    out = target.forward(tiny_params(), TINY, padded[None], at, causal, taps=taps)
    return padded, out.features[0], out.hidden[0]


def packed(texts, spec):
    """One row that holds the texts one after the other, then one row of padding; all tokens supervised."""
    sizes = [len(t) for t in texts]
    parts = [[x[:n] for x in features_of(t, spec.taps)[1:]] for t, n in zip(texts, sizes)]
    total = sum(sizes) + 1

    def join(arrays):
        joined = np.concatenate([np.asarray(a) for a in arrays])
        return np.pad(joined, [(0, total - len(joined))] + [(0, 0)] * (joined.ndim - 1))[None]

    return Rows(
        tokens=jnp.asarray(join(texts)),
        supervised=jnp.asarray(join([np.ones(n, bool) for n in sizes])),
        features=jnp.asarray(join([f for f, _ in parts])),
        hidden=jnp.asarray(join([h for _, h in parts])),
        segment=jnp.asarray(join([np.full(n, i + 1, np.int32) for i, n in enumerate(sizes)])),
        position=jnp.asarray(join([np.arange(n, dtype=np.int32) for n in sizes])),
    )


@partial(jax.jit, static_argnames="spec")
def drafted(spec, params, tokens, features, hidden, i):
    """Outputs of a chain drafted after position i was committed, its tokens forced to be the text's: [STEPS, D]."""
    state = eagle.empty(params, spec, jnp.zeros((1, 32), jnp.int32), 1)
    pairs = Commit(tokens[None, 1:], (i + 1)[None], features[None, :-1], hidden[None, :-1])
    state = eagle.feed(params, spec, state, pairs, jnp.array([0]))
    tree = TreeSpec("chain", STEPS, 1, 1, STEPS + 1)
    step = eagle.draft_step(params, spec, state, tree, partial(eagle.candidates, spec, None, tree))
    carry = eagle.Branches(*eagle.empty_rows(spec, state, STEPS), eagle.wide(state.output, 1))
    outputs = [state.output[0]]
    for depth in range(1, STEPS):
        frontier = Frontier(
            tokens=tokens[i + 1 + depth][None, None],
            source=jnp.zeros((1, 1), jnp.int32),
            index=jnp.zeros((1, 1), jnp.int32),
            score=jnp.zeros((1, 1)),
            valid=jnp.ones((1, 1), bool),
            depth=jnp.int32(depth),
            attend=(jnp.arange(STEPS) < depth)[None, None],
        )
        _, _, carry = step(carry, frontier)
        outputs.append(carry.output[0, 0])
    return jnp.stack(outputs)


def agree(spec, params, texts):
    """Largest difference between unrolled training and real drafting, over every row that has the tokens for it."""
    outputs = np.stack([np.asarray(o) for o in unroll(params, spec, packed(texts, spec), STEPS)])
    worst, start = 0.0, 0
    for text in texts:
        seen = features_of(text, spec.taps)
        for i in range(len(text) - STEPS):
            real = drafted(spec, params, *seen, jnp.int32(i))
            worst = max(worst, np.abs(outputs[:, 0, start + i] - real).max())
        start += len(text)
    return worst


@pytest.mark.parametrize("name", SPECS)
def test_unrolled_rows_equal_drafted_chains_also_when_packed(name):
    spec, params = network(SPECS[name])
    assert agree(spec, params, [TEXT[:5], TEXT[4:]]) < 2e-5


def test_a_wrong_position_or_mask_or_state_is_caught(monkeypatch):
    spec, params = network(SPECS["eagle3.1"])
    with monkeypatch.context() as m:
        m.setattr(ttt, "earlier_rows", lambda rows, window: jnp.tril(jnp.ones((1, 14, 14), bool)))
        assert agree(spec, params, [TEXT[:5], TEXT[4:]]) > 1e-3, "one document saw another"
    with monkeypatch.context() as m:
        m.setattr(
            ttt, "diagonal_attention", lambda q, base, see, own: diagonal_attention(q, base, see, own[:1])
        )
        assert agree(spec, params, [TEXT]) > 1e-3, "own rows were forgotten"
    with monkeypatch.context() as m:
        other = SimpleNamespace(**{**vars(eagle_net), "recurrent": lambda params, spec, output: output})
        m.setattr(ttt, "net", other)
        assert agree(spec, params, [TEXT]) > 1e-3, "the state was not normed"
    with monkeypatch.context() as m:
        m.setattr(ttt, "ahead", lambda values, by: jnp.roll(values, -by + 1, axis=1))
        assert agree(spec, params, [TEXT]) > 1e-3, "features met the token of their own position"


def drawn(mask):
    return ["".join(".x"[int(x)] for x in row) for row in np.asarray(mask)]


def test_earlier_rows_as_drawn():
    """Two documents of three and two tokens, then padding."""
    segment = jnp.array([[1, 1, 1, 2, 2, 0]])
    rows = Rows(segment, segment > 0, segment, segment, segment, segment)
    assert drawn(earlier_rows(rows, 0)[0]) == ["x.....", "xx....", "xxx...", "...x..", "...xx.", ".....x"]
    assert drawn(earlier_rows(rows, 2)[0]) == ["x.....", "xx....", ".xx...", "...x..", "...xx.", ".....x"]


def test_supervised_slots_at_both_ends():
    """Prompt of three tokens, answer of four: tokens 3..6. Slot i at step j guesses token i + 2 + j.

    The first guess of all is token 4, from slot 2: token 3 is the target's own, drawn by the prefill. The last is
    token 6, and a second document begins after it.
    """
    supervised = jnp.array([[0, 0, 0, 1, 1, 1, 1, 0, 1, 1]], bool)
    segment = jnp.array([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
    rows = Rows(segment, supervised, segment, segment, segment, segment)
    assert drawn(supervised_rows(rows, 0))[0] == "..xxx..x.."
    assert drawn(supervised_rows(rows, 1))[0] == "..xx......"
    assert drawn(supervised_rows(rows, 2))[0] == "..x......."


def test_who_sees_whom_by_touching_one_token_at_a_time():
    """Row i of step j reads x[1..i+1+j] and features 0..i, as drawn; nothing else moves its output."""
    spec, params = network(SPECS["eagle3.1"])
    rows = packed([TEXT[:7]], spec)
    base = [np.asarray(o[0]) for o in unroll(params, spec, rows, 2)]
    by_token, by_features = [], []
    for t in range(7):
        moved = unroll(params, spec, rows._replace(tokens=rows.tokens.at[0, t].set(44)), 2)
        by_token.append([np.abs(np.asarray(o[0]) - b).max(-1) > 1e-7 for o, b in zip(moved, base)])
        moved = unroll(params, spec, rows._replace(features=rows.features.at[0, t].add(1.0)), 2)
        by_features.append([np.abs(np.asarray(o[0]) - b).max(-1) > 1e-7 for o, b in zip(moved, base)])
    seen = np.array(by_token).transpose(1, 2, 0)[:, :4]
    assert drawn(seen[0]) == [".x.....", ".xx....", ".xxx...", ".xxxx.."]
    assert drawn(seen[1]) == [".xx....", ".xxx...", ".xxxx..", ".xxxxx."]
    seen = np.array(by_features).transpose(1, 2, 0)[:, :4]
    assert drawn(seen[0]) == drawn(seen[1]) == ["x......", "xx.....", "xxx....", "xxxx..."]
