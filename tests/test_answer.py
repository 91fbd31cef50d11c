"""One request on the host: where ids, text and rounds end, what is timed, and telling ties from faults."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from kit import numpy_logits, plain_greedy, round_info
from tiny_model import write_model

from eagle4 import answer as ask
from eagle4 import decode, metrics
from eagle4.answer import Limits
from eagle4.decode import Params
from eagle4.errors import BadInput
from eagle4.policy_spec import PolicySpec
from eagle4.specs import DrafterSpec, SamplingSpec, System, TreeSpec
from eagle4.target.load import load
from eagle4.text import encode_chat, load_text

NEW, CAPACITY = 40, 512
FIXED = PolicySpec()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    checkpoint = load(write_model(tmp_path_factory.mktemp("tiny")))
    words = load_text(checkpoint.tokenizer)
    system = System(
        checkpoint.spec,
        DrafterSpec("prompt_lookup", 1, 3),
        TreeSpec(depth=3, nodes=4, buckets=(4,)),
    )
    prompt = encode_chat(words, [{"role": "user", "content": "abc def"}])
    plain = plain_greedy(checkpoint.params, checkpoint.spec, prompt, NEW)
    return system, Params(checkpoint.params), words, prompt, plain


def ended_well(reply):
    """Ids and rounds end at the same token, and no round breaks an identity."""
    rounds = metrics.rounds_of(reply.rounds, 0)
    metrics.check_identities(rounds, len(reply.ids) - 1)
    return rounds


def reply_of(tiny, new=NEW, stops=(), words=None):
    system, params, plain_words, prompt, _ = tiny
    limits = Limits(new, stops)
    return ask.answer(system, params, FIXED, words or plain_words, prompt, 0, limits, CAPACITY)


def test_an_answer_equals_the_independent_plain_decoder(tiny):
    reply = reply_of(tiny)
    assert reply.ids == tiny[4]
    assert reply.text == b"".join(tiny[2].pieces[i] for i in reply.ids).decode("utf-8", "replace")
    rounds = ended_well(reply)
    assert metrics.tau(rounds) > 1.5, "some drafts must be accepted for these tests to mean anything"
    assert reply.prefill_s > 0
    assert reply.decode_s > 0


def test_a_stop_id_ends_ids_and_rounds_at_itself(tiny):
    plain = tiny[4]
    for stop in dict.fromkeys(plain):
        reply = reply_of(tiny, words=replace(tiny[2], stop_ids=(stop,)))
        assert reply.ids == plain[: plain.index(stop) + 1]
        ended_well(reply)


def test_a_stop_string_ends_ids_text_and_rounds_at_the_token_that_completes_it(tiny, monkeypatch):
    monkeypatch.setattr(ask, "STRETCH", 3)
    pieces = [tiny[2].pieces[i] for i in tiny[4]]
    whole = b"".join(pieces).decode("utf-8", "replace")
    stops = {whole[i : i + n] for i in range(0, 30, 3) for n in (1, 4, 9)} | {"b'b'b'b'b", "'b'b'b"}
    cropped = 0
    for stop in sorted(stops):
        kept = next(k for k in range(1, NEW + 1) if stop.encode() in b"".join(pieces[:k]))
        reply = reply_of(tiny, stops=("never said", stop))
        assert reply.ids == tiny[4][:kept]
        assert reply.text == whole[: whole.index(stop)]
        rounds = ended_well(reply)
        cropped += bool(len(rounds.num_accepted)) and rounds.num_committed[-1] <= rounds.num_accepted[-1]
    assert cropped > 2, "some stop strings must be completed inside a block"


def test_stop_strings_that_never_come_change_nothing(tiny, monkeypatch):
    monkeypatch.setattr(ask, "STRETCH", 3)
    reply = reply_of(tiny, stops=("never said",))
    assert reply.ids == tiny[4]
    ended_well(reply)


def test_an_answer_of_one_token_has_no_rounds(tiny, monkeypatch):
    reply = reply_of(tiny, new=1)
    assert reply.ids == tiny[4][:1]
    assert len(ended_well(reply).num_accepted) == 0
    monkeypatch.setattr(
        decode, "generate", None
    )  # a stop that the first token completes needs no round either
    reply = reply_of(tiny, stops=(tiny[2].pieces[tiny[4][0]].decode(),))
    assert (reply.ids, reply.text) == (tiny[4][:1], "")
    assert len(ended_well(reply).num_accepted) == 0


def test_warming_up_compiles_all_that_an_answer_runs(tiny):
    system, params, words, _, _ = tiny
    ask.warm(system, params, FIXED, words, Limits(NEW), CAPACITY)
    sizes = decode.jit_start._cache_size(), decode.generate._cache_size()
    reply_of(tiny)
    assert (decode.jit_start._cache_size(), decode.generate._cache_size()) == sizes


def test_crop_keeps_the_rounds_of_the_first_ids():
    def column(*values):
        return np.array(values, np.int32)[:, None]

    rounds = round_info(
        active=column(1, 1, 1).astype(bool),
        drafted_depth=column(4, 0, 2),
        drafted_nodes=column(4, 0, 2),
        verified_nodes=np.array([8, 1, 4]),
        num_accepted=column(3, 0, 2),
        num_committed=column(4, 1, 3),
    )
    for kept, committed in [
        (1, []),
        (2, [1]),
        (4, [3]),
        (5, [4]),
        (6, [4, 1]),
        (7, [4, 1, 1]),
        (9, [4, 1, 3]),
    ]:
        cut = ask.crop(rounds, kept)
        assert cut.num_committed[:, 0].tolist() == committed
        assert cut.num_accepted[:, 0].tolist() == [3, 0, 2][: len(committed)]
        assert cut.verified_nodes.tolist() == [8, 1, 4][: len(committed)]
        metrics.check_identities(metrics.rounds_of(cut, 0), kept - 1)
    assert ask.crop(ask.no_rounds(), 1).num_committed.shape == (0, 1)


# --- ties ---

GAP = 1e-3


def twins(tiny, shift=0.0):
    """Weights in which another id's head row is that of the first answer token (plus `shift`), that id, and the
    answers by the lower and by the higher id of the two."""
    system, params, _, prompt, plain = tiny
    twin = next(i for i in range(255, 0, -1) if i not in plain and i != plain[0])
    head = np.array(params.target["head"])
    head[twin] = head[plain[0]] * (1 + shift)
    weights = params.target | {"head": jnp.array(head)}
    low, high = sorted((twin, plain[0]))
    answers = [[first, *plain_greedy(weights, system.model, [*prompt, first], 7)] for first in (low, high)]
    assert answers[0] != answers[1]
    return Params(weights), *answers


def compare(tiny, params, plain, ids, gap=GAP):
    return ask.compare_greedy(tiny[0], params, tiny[3], plain, ids, gap)


def test_equal_ids_are_identical_and_a_wrong_one_is_not(tiny):
    plain, params = tiny[4], tiny[1]
    assert compare(tiny, params, plain, plain) == (True, 0)
    for place in (0, 7, NEW - 1):
        wrong = [*plain[:place], (plain[place] + 1) % 256, *plain[place + 1 :]]
        assert compare(tiny, params, plain, wrong) == (False, 0)


def test_one_wrong_token_among_right_ones_is_found_wherever_it_stands(tiny):
    """Everything after the wrong token is what greedy decoding says after it, so only that one gives it away."""
    system, params, _, prompt, plain = tiny
    for place in (0, 5):
        start = [*plain[:place], (plain[place] + 1) % 256]
        wrong = start + plain_greedy(params.target, system.model, prompt + start, NEW - len(start))
        assert compare(tiny, params, plain, wrong) == (False, 0)


def test_a_wrong_answer_of_right_tokens_elsewhere_is_not_identical(tiny):
    """Judged at every position: the first id differs by a tie, a later one is simply wrong."""
    params, low, high = twins(tiny)
    high[4] = (high[4] + 1) % 256
    identical, ties = compare(tiny, params, low, high)
    assert not identical
    assert ties <= 1, "a fault is not counted as a tie"


def test_an_exact_tie_is_identical_and_counted(tiny):
    params, low, high = twins(tiny)
    logits = numpy_logits(params.target, tiny[0].model, tiny[3])[-1]
    assert logits[low[0]] == logits[high[0]] == logits.max()
    for plain, ids in ((low, high), (high, low)):
        identical, ties = compare(tiny, params, plain, ids)
        assert identical
        assert ties >= 1


def test_a_near_tie_is_one_only_within_the_gap(tiny):
    params, low, high = twins(tiny, shift=2e-5)
    logits = numpy_logits(params.target, tiny[0].model, tiny[3])[-1]
    gap = abs(logits[low[0]] - logits[high[0]])
    assert 0 < gap < GAP / 2
    best, second = (low, high) if logits[low[0]] > logits[high[0]] else (high, low)
    assert compare(tiny, params, best, second)[0]
    assert not compare(tiny, params, best, second, gap / 4)[0]


def test_an_answer_that_breaks_off_or_runs_on_is_not_identical(tiny):
    plain, params = tiny[4], tiny[1]
    for shorter, longer in ((plain[:-1], plain), (plain[:1], plain[:2])):
        assert not compare(tiny, params, longer, shorter)[0]
        assert not compare(tiny, params, shorter, longer)[0]


# --- room and time ---


def test_capacity_comes_in_coarse_steps_and_holds_the_deepest_tree(tiny):
    system = tiny[0]
    deep = replace(system, tree=TreeSpec(depth=30, nodes=31))
    assert ask.capacity_for([system], 100, 400) == 512
    assert ask.capacity_for([system], 100, 409) == 1024
    assert ask.capacity_for([system, deep], 100, 400) == ask.capacity_for([deep, system], 100, 400) == 1024
    assert ask.capacity_for([system], 1000, 24) == 1536
    with pytest.raises(
        BadInput, match=r"1000 tokens \+ max_new_tokens=25 exceeds .* 1024 positions; shorten"
    ):
        ask.capacity_for([system], 1000, 25)


def test_a_buffer_without_room_is_refused(tiny):
    system, params, words, prompt, _ = tiny
    with pytest.raises(BadInput, match="cache slots, but only 64 were allocated"):
        ask.answer(system, params, FIXED, words, prompt, 0, Limits(NEW), 64)


def test_a_requests_seed_is_its_names_alone():
    names = [f"0/prompt {i}/{turn}" for i in range(500) for turn in (0, 1)]
    seeds = [ask.seed_of(name) for name in names]
    assert seeds == [ask.seed_of(name) for name in names]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert ask.seed_of("123456789") == 0xCBF43926 - 2**31, "CRC-32's published check value"


def test_phases_are_timed_after_the_first_round(tiny):
    system, params, words, prompt, _ = tiny
    spent = ask.phase_ms(system, params, FIXED, words, prompt, 0, 12, CAPACITY)
    assert spent.keys() == {"draft_ms", "verify_ms", "commit_ms"}
    assert all(ms > 0 for ms in spent.values())
    assert ask.phase_ms(system, params, FIXED, words, prompt, 0, 2, CAPACITY) == {}


def test_penalised_ids_are_judged_by_penalised_logits(tiny):
    """A prompt longer than a chunk's start and an answer that crosses a chunk: counts must follow the text."""
    system, params, words, prompt, plain = tiny
    penalised = replace(system, sampling=SamplingSpec(repetition_penalty=1.3, frequency_penalty=0.4))
    reply = ask.answer(penalised, params, FIXED, words, prompt, 0, Limits(NEW), CAPACITY)
    assert reply.ids != plain
    lengths = np.int32(len(prompt)), np.int32(len(prompt) + len(reply.ids))

    def gaps(judge):
        padded = np.zeros((1, CAPACITY), np.int32)
        padded[0, : lengths[1]] = [*prompt, *reply.ids]
        return np.asarray(decode.jit_shortfall(judge, params.target, padded, *lengths))

    assert lengths[1] > 64
    assert gaps(penalised).max() < 1e-4
    assert gaps(system).max() > 0.1
