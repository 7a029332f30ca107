"""Deeds of a scheduler: requests that arrive together, are sampled, given up, or continue others, and their sources."""

import time
from dataclasses import replace
from random import Random

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.decoding.answer import INCOMPLETE, Sampling, answer_text, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Piece, Submission

from .deeds import deed
from .drawing import draw_sampling, expect_drawn
from .oracles import ROUNDING, expect, expect_greedy
from .questions import Checks, fed_with, takes_everything
from .world import World

SOURCES = 2


@deed("served", 5)
def served(world: World, index: OpenIndex) -> None:
    """Check a scheduler's answers against plain transformers, with log-probabilities, text, finish reason and counts.

    The scheduler may serve two indices with a common beginning, with few caches in memory.
    """
    random, indices = Random(world.case.more), {"": index}
    if random.random() < 0.4:
        text = world.document[: len(world.document) * 3 // 4] + world.some_text(world.case.tail + 9, world.case.more)
        indices["other"] = world.build("other.skv", world.plan(text))
    checks = {name: Checks(world, one) for name, one in indices.items()}
    askers = [(name, world.dense(one)) for name, one in indices.items()]
    if takes_everything(world):
        everything = {"guard": None, "prefill_budget": checks[""].all_of_a_prefill()}
        sparse = [(name, world.asker(one, "100%", **everything)) for name, one in indices.items()]
        dense_from = random.choice([None, 1, 2, 3])
        askers += [(name, replace(one, config=replace(one.config, dense_from=dense_from))) for name, one in sparse]
    kept_bytes, lanes = random.choice([0, 20_000, 1 << 22]), random.choice([1, 2, 8])
    scheduler = Scheduler(indices, slots=random.randint(1, 3), kept_bytes=kept_bytes, lanes=lanes)
    said = list[torch.Tensor]()
    try:
        for _ in range(3):
            for request, pieces in _round(world, scheduler, askers, said, random):
                said.append(_held(world, checks[request.index], request, pieces))
    finally:
        scheduler.close(0)


def _round(
    world: World, scheduler: Scheduler, askers: list[tuple[str, Session]], said: list[torch.Tensor], random: Random
) -> list[tuple[Submission, list[Piece]]]:
    """Submit requests together; return each with its pieces, when nothing runs any more.

    Some are given up at a piece.
    """
    streams = []
    for _ in range(random.choice([1, 3, 5])):
        request = _drawn(world, *random.choice(askers), said, random)
        try:
            streams.append((request, scheduler.submit(request)))
        except UsageError as error:  # no position is left
            expect("positions" in str(error) or "RoPE" in str(error), "served", f"refused: {error}")
    found = []
    for request, stream in streams:
        if random.random() < 0.15:
            next(iter(stream))
        else:
            found.append((request, list(stream)))
    while (measures := scheduler.measures()).running or measures.waiting:
        time.sleep(0.001)
    return found


def _drawn(world: World, name: str, asker: Session, said: list[torch.Tensor], random: Random) -> Submission:
    """Return a request: a new question, or one that continues an earlier question with its answer, or a part of
    them."""
    tokens = question_ids(asker.index, world.question(random.randint(0, 2)), raw=world.case.raw)
    if said and random.random() < 0.5:
        earlier = random.choice(said)
        tokens = torch.cat([earlier[: random.choice([len(earlier), random.randint(1, len(earlier))])], tokens])
    longest = world.case.answer + random.randint(0, 4)
    sampling = random.choice([Sampling(longest), draw_sampling(random, longest)])
    sources = 0 if appends(asker.cache.stored_layers) else random.choice([0, 0, SOURCES])
    request = Submission(name, asker.config, tokens, sampling, logprobs=random.choice([None, 0, 3]), sources=sources)
    return replace(request, stop=_stop(asker.index, random.choice(said))) if said and random.random() < 0.3 else request


def _stop(index: OpenIndex, earlier: torch.Tensor) -> tuple[str, ...]:
    """Return texts that a model is likely to say: the end of its earlier answer, and the last letter of that text."""
    text = answer_text(index, earlier[-2:].tolist()).strip(INCOMPLETE)
    return tuple(one for one in (text, text[-1:]) if one and INCOMPLETE not in one)


def _held(world: World, checks: Checks, request: Submission, pieces: list[Piece]) -> torch.Tensor:
    """Check a request's answer against its oracles; return the tokens that the model was fed."""
    index, answer, usage = checks.index, [token for one in pieces for token in one.tokens], pieces[-1].usage
    fed, asked = fed_with(request.tokens, answer), len(request.tokens)
    steps = checks.truth(fed)[asked - 1 :]
    if request.sampling.temperature:
        expect_drawn(request.sampling, steps, answer, index.model.device, "served")
    else:
        expect_greedy(steps, answer, "served answer", "against plain transformers")
    told, near = steps.double().log_softmax(-1), 20 * ROUNDING * float(steps.abs().max())
    logprobs = [one for piece in pieces for one in piece.logprobs]
    expect(len(logprobs) == (0 if request.logprobs is None else len(answer)), "served logprobs", f"{len(logprobs)}")
    for step, one in enumerate(logprobs):
        right = one.token == answer[step] and abs(one.logprob - float(told[step, one.token])) <= near
        expect(right and len(one.top) == request.logprobs, "served logprobs", f"of token {step}: {one}")
    assert usage is not None
    counts = usage.prompt_tokens, usage.answer_tokens
    expect(counts == (len(index.input_ids) + asked, len(answer)), "served counts", f"{usage}")
    whole, text = answer_text(index, answer), "".join(one.text for one in pieces)
    places = [whole.index(one) for one in request.stop if one in whole]
    before = answer_text(index, answer[:-1])
    expect(not any(one in before for one in request.stop), "served stop", f"{request.stop} not at once in {whole!r}")
    finish = "stop" if answer[-1] in world.ends or places else "length"
    expect(pieces[-1].finish == finish, "served finish", f"{pieces[-1].finish} of {answer} until {request.stop}")
    expect(
        text == whole[: min(places, default=len(whole))], "served text", f"{text!r} of {answer} until {request.stop}"
    )
    _sources(checks, request, answer, [(one.tokens, one.score, one.text) for one in usage.sources])
    return fed


def _sources(
    checks: Checks, request: Submission, answer: list[int], found: list[tuple[tuple[int, int], float, str]]
) -> None:
    """Check that sources are text of the prompt, and equal those of the question alone if the answers are equal."""
    index = checks.index
    whole = str(index.tokenizer.decode(index.input_ids, clean_up_tokenization_spaces=False))
    expect(all(text in whole for *_, text in found), "sources", f"{found} are no text of the prompt")
    expect(len(found) <= request.sources, "sources", f"{len(found)}, not {request.sources}")
    if not request.sources:
        return
    alone = Session.open(index, request.config).ask(request.tokens, request.sampling, sources=request.sources)
    if alone.ids == answer:
        apart = [abs(one.score - score) for one, (_, score, _) in zip(alone.sources, found, strict=True)]
        expect(max(apart, default=0.0) <= 2e-3, "sources", f"{found}, and of the question alone {alone.sources}")
