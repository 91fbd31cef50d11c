"""Methods side by side: the same prompts, interleaved prompt by prompt, so that the machine's drift hits all alike."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from eagle4 import answer as ask
from eagle4 import text
from eagle4.answer import Answer, Limits
from eagle4.errors import BadInput
from eagle4.methods import Method
from eagle4.metrics import predicted_of, rounds_of
from eagle4.prompts import Prompt
from eagle4.summary import Sample
from eagle4.text import Text

TIE_GAP = 1e-3  # two logits closer than this are a tie: rounding may pick either


class Turn(NamedTuple):
    """One method's answer to one turn of a conversation."""

    number: int
    prompt_ids: list[int]
    answer: Answer


def capacities(
    methods: Sequence[Method], words: Text, prompts: Sequence[Prompt], limits: Limits, turns: int
) -> dict[str, int]:
    """Buffer size of each prompt, by id: it holds the last turn, whatever the answers to earlier ones will be.

    Raises BadInput for a prompt that the model's context cannot hold.
    """
    sizes = {}
    for prompt in prompts:
        messages = []
        for turn in prompt.turns[:turns]:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        ids = text.encode_chat(words, messages[:-1])
        longest = len(ids) + limits.max_new_tokens * (len(prompt.turns[:turns]) - 1)
        try:
            sizes[prompt.id] = ask.capacity_for([m.system for m in methods], longest, limits.max_new_tokens)
        except BadInput as error:
            raise BadInput(f"prompt {prompt.id!r}: {error}") from None
    return sizes


def converse(
    method: Method, words: Text, prompt: Prompt, limits: Limits, capacity: int, turns: int, seed: int
) -> Iterator[Turn]:
    """Answer the turns of a conversation; each turn follows the model's own answer to the one before."""
    messages: list[dict[str, str]] = []
    for number, content in enumerate(prompt.turns[:turns]):
        messages.append({"role": "user", "content": content})
        ids = text.encode_chat(words, messages)
        own = ask.seed_of(f"{seed}/{prompt.id}/{number}")
        # The text of an earlier answer may take more tokens than it was made of: bytes that are not UTF-8 do.
        need = ask.capacity_for([method.system], len(ids), limits.max_new_tokens)
        if need > capacity:
            ask.warm(method.system, method.params, method.policy, words, limits, capacity := need)
        reply = ask.answer(method.system, method.params, method.policy, words, ids, own, limits, capacity)
        messages.append({"role": "assistant", "content": reply.text})
        yield Turn(number, ids, reply)


def measure(
    methods: Sequence[Method],
    words: Text,
    prompts: Sequence[Prompt],
    limits: Limits,
    turns: int,
    sizes: Mapping[str, int],
    told: Callable[[str], None],
) -> Iterator[list[Sample]]:
    """Samples of every method for one prompt after another. methods[0] is plain decoding, the baseline.

    `sizes` are the `capacities` of the prompts. Yields prompt by prompt, so an interrupted run keeps whole prompts.
    `told` hears what happens, for a progress bar. Which method goes first rotates.
    """
    for capacity in sorted(set(sizes.values())):
        for method in methods:
            told(f"compiling {method.name}, {capacity} slots")
            ask.warm(method.system, method.params, method.policy, words, limits, capacity)
    for i, prompt in enumerate(prompts):
        replies: dict[str, list[Turn]] = {}
        for k in range(len(methods)):
            method = methods[(i + k) % len(methods)]
            told(f"{method.name}: {prompt.id}")
            seed = method.system.sampling.seed
            replies[method.name] = list(
                converse(method, words, prompt, limits, sizes[prompt.id], turns, seed)
            )
        yield [
            sample(method, prompt, turn, plain)
            for method in methods
            for turn, plain in zip(replies[method.name], replies[methods[0].name])
        ]


def sample(method: Method, prompt: Prompt, turn: Turn, plain: Turn) -> Sample:
    """One measured turn; at temperature 0 its ids are held against plain decoding's."""
    identical, ties = None, 0
    if method.system.sampling.greedy:
        identical, ties = ask.compare_greedy(
            method.system, method.params, turn.prompt_ids, plain.answer.ids, turn.answer.ids, TIE_GAP
        )
    rounds = rounds_of(turn.answer.rounds, 0)
    return Sample(
        method=method.name,
        prompt_id=prompt.id,
        category=prompt.category,
        prompt_tokens=len(turn.prompt_ids),
        tokens=int(rounds.num_committed.sum()),
        decode_s=turn.answer.decode_s,
        prefill_s=turn.answer.prefill_s,
        rounds=rounds,
        identical=identical,
        ties=ties,
        turn=turn.number,
        predicted_ms=None if method.params.costs is None else predicted_of(turn.answer.rounds, 0),
    )


def time_phases(
    methods: Sequence[Method],
    words: Text,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    new: int,
    told: Callable[[str], None],
) -> list[Sample]:
    """The samples, with draft, verify and commit ms for the first prompt of each category.

    Measured apart from tokens/s, in the phased form, over `new` tokens of the first turn.
    """
    first = {p.category: p for p in reversed(prompts)}
    chosen = {p.id: p for p in first.values()}
    timed = {}
    for id_, prompt in chosen.items():
        ids = text.encode_chat(words, [{"role": "user", "content": prompt.turns[0]}])
        for method in methods:
            told(f"phases of {method.name}: {id_}")
            capacity = ask.capacity_for([m.system for m in methods], len(ids), new)
            seed = ask.seed_of(f"{method.system.sampling.seed}/{id_}/0")
            timed[method.name, id_, 0] = ask.phase_ms(
                method.system, method.params, method.policy, words, ids, seed, new, capacity
            )
    return [s._replace(**timed.get((s.method, s.prompt_id, s.turn), {})) for s in samples]
