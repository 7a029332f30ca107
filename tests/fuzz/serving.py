"""Deeds of a scheduler: requests that come together, are sampled, given up, or continue others, and their sources."""

import time
from random import Random

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.decoding.answer import answer_text, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Sampling
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.submission import Piece, Submission

from .deeds import deed
from .drawing import draw_sampling, expect_drawn
from .oracles import ROUNDING, expect, expect_greedy
from .questions import Checks, fed_with, takes_everything
from .world import World

SOURCES = 2


@deed("served", 5)
def served(world: World, index: OpenIndex) -> None:
    """Answers of a scheduler are those of plain transformers, with their log-probabilities, text, finish and counts."""
    random, checks = Random(world.case.more), Checks(world, index)
    askers = [world.dense(index)]
    if takes_everything(world):
        askers.append(world.asker(index, "100%", guard=None, prefill_budget=checks.all_of_a_prefill()))
    scheduler = Scheduler({"": index}, slots=random.randint(1, 3), kept_bytes=random.choice([0, 20_000, 1 << 22]))
    said = list[torch.Tensor]()
    try:
        for _ in range(3):
            for request, pieces in _round(world, scheduler, askers, said, random):
                said.append(_held(world, checks, request, pieces))
    finally:
        scheduler.close(0)


def _round(
    world: World, scheduler: Scheduler, askers: list[Session], said: list[torch.Tensor], random: Random
) -> list[tuple[Submission, list[Piece]]]:
    """Requests that are submitted together, with their pieces, once nothing runs; some are given up at a piece."""
    streams = []
    for _ in range(random.choice([1, 3, 5])):
        request = _drawn(world, random.choice(askers), said, random)
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


def _drawn(world: World, asker: Session, said: list[torch.Tensor], random: Random) -> Submission:
    """A request: a new question, or one that continues what was asked and answered before, or some of it."""
    tokens = question_ids(asker.index, world.question(random.randint(0, 2)), raw=world.case.raw)
    if said and random.random() < 0.5:
        earlier = random.choice(said)
        tokens = torch.cat([earlier[: random.choice([len(earlier), random.randint(1, len(earlier))])], tokens])
    longest = world.case.answer + random.randint(0, 4)
    sampling = random.choice([Sampling(longest), draw_sampling(random, longest)])
    sources = 0 if appends(asker.cache.stored_layers) else random.choice([0, 0, SOURCES])
    return Submission("", asker.config, tokens, sampling, logprobs=random.choice([None, 0, 3]), sources=sources)


def _held(world: World, checks: Checks, request: Submission, pieces: list[Piece]) -> torch.Tensor:
    """Hold a request's answer to its oracles; returns the tokens that the model was fed."""
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
    finish = "stop" if answer[-1] in world.ends else "length"
    expect(pieces[-1].finish == finish, "served finish", f"{pieces[-1].finish} of {answer}")
    text = "".join(one.text for one in pieces)
    # Bytes of which a later one makes no text were shown before it came.
    same = world.case.tokenizer == "letters" or text == answer_text(index, answer)
    expect(same, "served text", f"{text!r} of {answer}")
    _sources(checks, request, answer, [(one.tokens, one.score, one.text) for one in usage.sources])
    return fed


def _sources(
    checks: Checks, request: Submission, answer: list[int], found: list[tuple[tuple[int, int], float, str]]
) -> None:
    """Sources are text of the prompt, and those of the question alone, whose answer rounding may change."""
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
