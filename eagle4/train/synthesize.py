"""Training data from the target itself: its answers to prompts, given ones or ones it wrote.

Answers come from the project's own closed loop (`eagle4.serve`), so they are exactly what the target would say.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from eagle4 import text
from eagle4.answer import seed_of
from eagle4.decode import Params
from eagle4.errors import BadInput
from eagle4.policy_spec import PolicySpec
from eagle4.prompts import Prompt
from eagle4.serve import Request, Shape, serve
from eagle4.specs import ModelSpec, SamplingSpec, System
from eagle4.state import CHUNK
from eagle4.text import Text
from eagle4.train.responses import Response

SORTED = 512
_MARK = "⟦user turn⟧"


def answers(
    weights: Any,
    spec: ModelSpec,
    words: Text,
    conversations: Iterable[tuple[str, str]],
    sampling: SamplingSpec,
    max_new_tokens: int,
    shape: Shape,
    told: Callable[[int], None],
) -> Iterator[Response]:
    """The target's answers to (prompt id, user turn) pairs, in the order in which they finish.

    Prompts that leave no room for the answer in a row are left out. `told` hears each answer's number of tokens.
    """
    requests = _requests(words, conversations, sampling, max_new_tokens, shape)
    system = plain_system(spec, sampling)
    for served in serve(system, Params(weights), PolicySpec(), requests, shape, words.stop_ids):
        told(len(served.ids))
        finished = served.ids[-1] in words.stop_ids
        yield Response(served.request.name, [], served.ids, sampling.temperature, finished)


def plain_system(spec: ModelSpec, sampling: SamplingSpec) -> System:
    """Plain decoding: in a full batch a draft would only cost."""
    return System(spec, verifier="greedy" if sampling.greedy else "point_mass", sampling=sampling)


def _requests(
    words: Text,
    conversations: Iterable[tuple[str, str]],
    sampling: SamplingSpec,
    max_new_tokens: int,
    shape: Shape,
) -> Iterator[Request]:
    """Requests that fit, those of `SORTED` conversations at a time by length: the loop prefills neighbours together."""
    queue = iter(conversations)
    while window := list(islice(queue, SORTED)):
        told = [(name, text.encode_chat(words, [{"role": "user", "content": turn}])) for name, turn in window]
        for name, ids in sorted(told, key=lambda one: len(one[1])):
            chunks = -(-len(ids) // CHUNK) * CHUNK
            if max(chunks, len(ids) + max_new_tokens + 1) <= shape.capacity:
                yield Request(name, ids, seed_of(f"{sampling.seed}/{name}"), max_new_tokens)


def opening(words: Text) -> list[int]:
    """Ids of the chat template up to where the user's words begin: what the target continues to write a prompt."""
    rendered = text.render_chat(words, [{"role": "user", "content": _MARK}])
    before, found, _ = rendered.partition(_MARK)
    if not found:
        raise BadInput(
            f"the chat template of {words.name} does not show the user's turn; give prompts instead"
        )
    return words.tokenizer.encode(before, add_special_tokens=False).ids


def written_turns(
    weights: Any,
    spec: ModelSpec,
    words: Text,
    first: int,
    number: int,
    sampling: SamplingSpec,
    max_new_tokens: int,
    shape: Shape,
) -> Iterator[tuple[str, list[int], str]]:
    """User turns that the target writes after its template's opening: (id, token ids, text), finished ones only.

    Numbers first .. first + number − 1 seed the draws, so a resumed run writes new ones.
    """
    begin = opening(words)
    requests = (
        Request(f"written/{i:06d}", begin, seed_of(f"{sampling.seed}/written/{i}"), max_new_tokens)
        for i in range(first, first + number)
    )
    system = plain_system(spec, sampling)
    for served in serve(system, Params(weights), PolicySpec(), requests, shape, words.stop_ids):
        turn = text.decode(words, served.ids).strip()
        if served.ids[-1] in words.stop_ids and turn:
            yield served.request.name, served.ids[:-1], turn


def turns_of(prompts: Iterable[Prompt], done: set[str]) -> Iterator[tuple[str, str]]:
    """First turns of prompts that have no answer yet, each text once."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id not in done and prompt.turns[0] not in seen:
            seen.add(prompt.turns[0])
            yield prompt.id, prompt.turns[0]
