"""Deeds (operations of a case that are checked) that ask: several questions at once, other placements, other forms."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.sparse_layer import appends, divides_questions
from sparsekv.runtime.cache.kept_turns import KeptTurns, TurnStore
from sparsekv.runtime.decoding.answer import Answer, Sampling, decoded, question_ids
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.engine import Engine, Request, TokenLogprobs, pack, why_alone
from sparsekv.runtime.decoding.lossless import LONGEST, DraftingEngine, Verification
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.decoding.threads import exclusive
from sparsekv.runtime.selection.interface import DENSE, MethodSpec
from sparsekv.runtime.tracing.trace import TracedIndex

from .deeds import deed
from .drawing import draw_sampling, expect_drawn
from .masking import Recording
from .oracles import ROUNDING, Wrong, expect, expect_greedy, plain_over
from .questions import Checks, expect_same_steps, fed_with, rounding_decides, stepped, takes_everything
from .world import World, stored_rows

UNMEASURED = {"guard": None, "ahead": False, "question_prefill": None, "prefill_budget": None}
"""Changes that remove the options of a case that dense attention refuses."""


@deed("batch", 10)
def batch(world: World, index: OpenIndex) -> None:
    """Check that answers that share steps equal plain transformers' answers, or the answer of the question alone."""
    random, checks, case = Random(world.case.more), Checks(world, index), world.case
    number, sampling = random.randint(2, 4), Sampling(case.answer)
    asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(number)]
    together = random.randint(1, number + 1)
    askers = {"dense": world.dense(index)}
    if takes_everything(world):
        askers["everything"] = world.asker(index, "100%", prefill_budget=checks.all_of_a_prefill())
    for kind, asker in askers.items():
        if why_alone(index, asker.config.attention, asker.cache):
            continue
        for ids, answer in zip(asked, asker.ask_all(asked, sampling, together=together), strict=True):
            steps = checks.truth(fed_with(ids, answer.ids))[len(ids) - 1 :]
            expect_greedy(steps, answer.ids, f"{kind} batch", f"{number} questions, {together} together")
    densely = replace(world.config(index, **UNMEASURED), dense_from=1)
    asker = Session.open(index, densely)
    if together > 1 and not why_alone(index, densely.attention, asker.cache):
        for ids, answer in zip(asked, asker.ask_all(asked, sampling, together=together), strict=True):
            steps = checks.truth(fed_with(ids, answer.ids))[len(ids) - 1 :]
            expect_greedy(steps, answer.ids, "batch of dense steps", f"{number} questions, {together} together")
    asker = world.asker(index)
    if not why_alone(index, asker.config.attention, asker.cache):
        _copies(world, index, asker, asked[0], number, sampling)
        first = asker.ask_all(asked, sampling, together=together)
        again = asker.ask_all(asked, sampling, together=together)
        expect(_ids(first) == _ids(again), "batch again", f"{_ids(first)}, then {_ids(again)}")


@deed("queue", 5)
def queue(world: World, index: OpenIndex) -> None:
    """Check that answers over a few slots equal plain transformers' answers, while other questions join, end or are
    dropped.

    Questions are fed in parts, and some continue earlier answers, whose rows are kept.
    """
    random, checks = Random(world.case.more), Checks(world, index)
    everything = takes_everything(world) and random.random() < 0.7
    asker = world.dense(index)
    if everything:
        asker = world.asker(index, "100%", prefill_budget=checks.all_of_a_prefill())
        asker = Session.open(index, replace(asker.config, dense_from=random.choice([None, 2, 3])))
    if why_alone(index, asker.config.attention, asker.cache):
        return
    cache = pack(asker.cache, random.randint(1, 3))
    turns = KeptTurns(
        TurnStore(random.choice([20_000, 1 << 20])),
        divided=divides_questions(cache.stored_layers) and not cache.states.kinds.keeping,
    )
    engine, said = Engine(index, cache, chunk=random.choice([None, 1, 5, 64]), turns=turns), list[torch.Tensor]()
    cache.rewind()
    with exclusive(index.model), engine.running():
        for _ in range(24):
            for _ in range(random.choice([0, 0, 1, 2])):
                _join(world, engine, said, random)
            running = list(engine.active.values())
            if running and random.random() < 0.1:
                engine.drop(random.choice(running))
            for sequence, answer in engine.run_step() if engine.active or engine.waiting else ():
                expect(isinstance(answer, Answer), "queue", f"{answer}")
                ids = sequence.request.question
                fed = fed_with(ids, sequence.answer)
                said.append(fed)
                expect_greedy(checks.truth(fed)[len(ids) - 1 :], sequence.answer, "queued answer", f"the {len(said)}th")


def _join(world: World, engine: Engine, said: list[torch.Tensor], random: Random) -> None:
    """Add a waiting question: a new one, or one that continues an earlier question with its answer, or a part of
    them."""
    asked = question_ids(engine.index, world.question(random.randint(0, 2)), raw=world.case.raw)
    if said and random.random() < 0.5:
        earlier = random.choice(said)
        asked = torch.cat([earlier[: random.choice([len(earlier), random.randint(1, len(earlier))])], asked])
    with suppress(UsageError):  # the question is too long for the model
        engine.waiting.append(engine.sequence(Request(asked, Sampling(random.randint(1, world.case.answer + 2)))))


@deed("lossless", 5)
def lossless(world: World, index: OpenIndex) -> None:
    """Check that lossless answers, greedy or sampled, equal plain transformers' answers.

    This must hold for any drafts and for any repetitions in the text. Some answers are stopped or cut, and some run in
    the loop of a batch.
    """
    checks, case, random = Checks(world, index), world.case, Random(world.case.more)
    in_place, longest = random.random() < 0.5, random.choice([1, 2, 4 * case.answer, 20])
    sampling = random.choice([Sampling(longest), draw_sampling(random, longest)])
    for config in (choose_config(index.artifact, DENSE), world.config(index, **UNMEASURED)):
        # Refused: a state, RoPE that depends on the length, or tokens that join the index.
        with suppress(UsageError):
            kept = replace(config, lossless=True)
            engine = DraftingEngine(index, index.cache(kept), kept)
            if in_place:  # verify the drafts in place, as on a GPU
                engine.verification = Verification(index, engine.sequence_cache, LONGEST + 1)
            asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(2)]
            told, streamed = f"drafted by {config.attention.name}", dict[int, list[TokenLogprobs | None]]()
            requests = [
                Request(ids, sampling, on_token=partial(_note, streamed.setdefault(place, [])), logprobs=2)
                for place, ids in enumerate(asked)
            ]
            found = dict(engine.answers(requests))
            for place, ids in enumerate(asked):
                answer = found[place].ids
                steps = checks.truth(fed_with(ids, answer))[len(ids) - 1 :]
                if sampling.temperature:
                    expect_drawn(sampling, steps, answer, index.model.device, told)
                else:
                    expect_greedy(steps, answer, "lossless answer", told)
                near, plainly = 20 * ROUNDING * float(steps.abs().max()), steps.double().log_softmax(-1)
                for step, one in enumerate(streamed[place]):
                    right = one is not None and one.token == answer[step]
                    right = right and abs(one.logprob - float(plainly[step, one.token])) <= near  # type: ignore[union-attr]
                    expect(right, "lossless logprobs", f"of token {step} of {answer}: {one}")
                expect(len(streamed[place]) == len(answer), "lossless stream", f"{streamed[place]} of {answer}")


def _note(into: list[TokenLogprobs | None], token: int, logprobs: TokenLogprobs | None) -> None:
    into.append(logprobs)


def _copies(
    world: World, index: OpenIndex, asker: Session, asked: torch.Tensor, number: int, sampling: Sampling
) -> None:
    """Check that a question among copies of itself, which all choose the same, has the answer that it has alone.

    A hierarchical lookup with centroids for the rest is left out: alone, the centroids are those of the scored
    clusters, and together those of the finest level.
    """
    form = asker.config.attention
    represented = isinstance(form, MethodSpec) and (form.residual or form.method.replaces())
    if dict(world.case.options).get("lookup") == "hierarchical" and represented:
        return
    for answer in asker.ask_all([asked] * number, sampling, together=number):
        fed = fed_with(asked, answer.ids)
        logits = stepped(index, asker, fed, len(asked))
        try:
            expect_greedy(logits[len(asked) - 1 :], answer.ids, "batch of copies", f"{number} against one alone")
        except Wrong:
            if not rounding_decides(index, asker, fed, len(asked), logits):
                raise


def _ids(answers: list[Answer]) -> list[list[int]]:
    return [one.ids for one in answers]


@deed("places", 6)
def places(world: World, index: OpenIndex) -> None:
    """Check that rows on the device, in main memory and on disk give the same logits."""
    case = world.case
    asked = question_ids(index, world.question(0), raw=case.raw)
    first = world.asker(index, placement="device", ahead=False)
    fed = fed_with(asked, first.ask(asked, Sampling(case.answer)).ids)
    # The compiled step, which cannot read rows on disk, rounds probabilities below 1e-38 to 0, and torch rounds those
    # below 1e-45. In a loud model, other clusters without any probability then fill the budget.
    on_disk = Recording(index, first).asker if case.loud else first
    for placement, same in (("host", first), ("disk", on_disk)):
        found = stepped(index, world.asker(index, placement=placement, ahead=False), fed, len(asked))
        told = f"the device's, with rows on {placement}"
        expect_same_steps(found, world, index, same, fed, len(asked), "placement", told)


@deed("broken off", 4)
def broken_off(world: World, index: OpenIndex) -> None:
    """Check that an answer after an interrupted answer is unchanged."""
    case = world.case
    asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(2)]
    asker, sampling = world.asker(index), Sampling(case.answer + 3)
    expected = asker.ask(asked[0], sampling)

    def stop(text: str) -> None:
        raise InterruptedError(text)

    with suppress(InterruptedError):
        asker.ask(asked[1], sampling, stop)
    again = asker.ask(asked[0], sampling)
    expect(again.ids == expected.ids, "after a broken answer", f"{again.ids}, not {expected.ids}")


@deed("trace", 4)
def trace(world: World, index: OpenIndex) -> None:
    """Check that a traced answer equals the answer, and that the attention in the trace is finite."""
    case = world.case
    asked = question_ids(index, world.question(0), raw=case.raw)
    asker = world.asker(index, guard=None, ahead=False, placement="device")
    if appends(asker.cache.stored_layers):
        return  # a trace needs tokens that stay at their positions
    traced = TracedIndex(index, asker.config)
    answer, document = traced.trace(asked, case.answer, truth=bool(case.more % 2))
    fed = fed_with(asked, answer.ids)
    logits = stepped(index, asker, fed, len(asked))
    try:
        expect_greedy(logits[len(asked) - 1 :], answer.ids, "traced answer", "against the same steps untraced")
    except Wrong:
        if not rounding_decides(index, asker, fed, len(asked), logits):
            raise
    constants = list[str]()  # NaN and infinities among the numbers; a text may have the word, too
    json.loads(json.dumps(document), parse_constant=constants.append)
    expect("NaN" not in constants, "trace", "has a NaN")


@deed("trace without", 4)
def trace_without(world: World, index: OpenIndex) -> None:
    """Check an answer without a passage against plain transformers.

    In the layers that select, plain transformers' tokens do not attend to the passage. Answers and log-probabilities
    must agree for dense attention at any budget, and for the method at a budget of everything.
    """
    case, random, everything = world.case, Random(world.case.more), takes_everything(world)
    asked = question_ids(index, world.question(0), raw=case.raw)
    changes = {"guard": None, "ahead": False, "placement": "device"}
    if everything and random.random() < 0.7:
        changes["prefill_budget"], budget = Checks(world, index).all_of_a_prefill(), "100%"
    else:
        everything, budget = False, case.budget
    asker = world.asker(index, budget, **changes)
    if appends(asker.cache.stored_layers):
        return
    start = random.randrange(len(world.document) - 6)
    passage = world.document[start : start + random.randint(6, 40)]
    if not passage.strip():  # white space of a padded text, which --without refuses
        return
    traced = TracedIndex(index, asker.config)
    hidden = traced.hide([passage])
    expect(hidden.tolist() == _tokens_of(world, index, passage).tolist(), "hidden tokens", f"of {passage!r}")
    first = asker.ask(asked, Sampling(case.answer))
    found = traced.without(hidden, asked, case.answer, first, truth=True)
    plainly = [_log_probability(world, index, asked, first.ids, some) for some in (torch.zeros_like(hidden), hidden)]
    for kind in ("dense_log_probability", *(("log_probability",) if everything else ())):
        for told, (expected, error) in zip(found[kind], plainly, strict=True):
            expect(abs(told - expected) <= error, kind, f"{told}, not {expected}, of {first.ids} without {passage!r}")
    if everything and (answer := _greedy(world, index, asked, hidden)) is not None:
        expect(found["answer"] == answer, "answer without", f"{found['answer']!r}, not {answer!r}")


def _tokens_of(world: World, index: OpenIndex, passage: str) -> torch.Tensor:
    """Return a mask [N] of an index's tokens that belong to a passage, at each place of the passage; a token is a
    byte."""
    trimmed = world.case.template == "trims" and not world.case.raw
    document = world.document.lstrip() if trimmed else world.document
    held = index.artifact.manifest.prompt.border.held if index.artifact.manifest.prompt.border else ""
    first = len(index.input_ids) + len(held.encode()) - len(document.encode())
    found = torch.zeros(len(index.input_ids), dtype=torch.bool)
    for match in re.finditer(r"\s+".join(map(re.escape, passage.split())), document):
        start, stop = (first + len(document[:place].encode()) for place in match.span())
        found[start:stop] = True
    return found


def _without(world: World, index: OpenIndex, fed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the logits [T, V] of tokens [T] after the stored prompt.

    The layers that select do not attend to the tokens in `hidden`.
    """
    rows = stored_rows(world.folder / "index.skv", world.case.layers)
    of_layers = dict.fromkeys(index.artifact.manifest.indexed_layers, hidden)
    return plain_over(world, rows, index.input_ids, fed, of_layers)


def _log_probability(
    world: World, index: OpenIndex, asked: torch.Tensor, answer: list[int], hidden: torch.Tensor
) -> tuple[float, float]:
    """Return an answer's log-probability, and the largest error that rounding may cause."""
    logits = _without(world, index, fed_with(asked, answer), hidden)[len(asked) - 1 :].double()
    total = logits.log_softmax(-1).gather(1, torch.tensor(answer, device=logits.device)[:, None]).sum()
    return float(total), 10 * ROUNDING * float(logits.abs().max()) * len(answer)


def _greedy(world: World, index: OpenIndex, asked: torch.Tensor, hidden: torch.Tensor) -> str | None:
    """Return the text of the greedy answer by plain transformers; None if rounding decides a token."""
    answer: list[int] = []
    most = min(world.case.answer, world.room(len(index.input_ids), len(asked)))
    while len(answer) < most and not {*answer[-1:]} & world.ends:
        logits = _without(world, index, torch.cat([asked, torch.tensor(answer, dtype=torch.long)]), hidden)[-1]
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) <= 20 * ROUNDING * float(logits.abs().max()):
            return None
        answer.append(int(best.indices[0]))
    return decoded(world.tokenizer, answer)
