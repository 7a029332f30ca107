"""Deeds of conversations: several turns, a conversation that is saved, and threads that ask at once."""

import asyncio
from collections.abc import Sequence
from random import Random
from threading import Thread

import torch

from sparsekv.cli.answering.session import save_session
from sparsekv.formats.documents.continuation import BETWEEN
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.decoding.answer import Answer, Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.serving.messages import Message, conversation_tokens

from .deeds import deed
from .oracles import expect, expect_greedy, plain, plain_over
from .questions import Checks, apart, takes_everything
from .world import Rows, World, stored_rows

MARK = "@@@"
EDGES = "", "", " ", "\n", "  "
"""White space around an answer."""


def _turns(world: World) -> int:
    return 2 + world.case.more % 2


@deed("talk", 7)
def talk(world: World, index: OpenIndex) -> None:
    """Check each answer of a conversation against plain transformers, after the token ids of the template's
    conversation."""
    case = world.case
    stored = stored_rows(world.folder / "index.skv", case.layers)
    configs = [world.dense(index).config]
    if takes_everything(world) and case.guard is None:
        own = {"question_prefill": "own", "prefill_budget": None, "ahead": False, "placement": "device"}
        configs.append(world.asker(index, "100%", **own).config)
    for config in configs[-1:] if case.more % 3 else configs:
        one = Conversation(index, config, raw=case.raw)
        for number in range(_turns(world)):
            _turn(world, index, one, number, stored, "talk")


def _turn(world: World, index: OpenIndex, one: Conversation, number: int, stored: Rows, kind: str) -> None:
    case, question, before = world.case, world.question(number), one.before(len(one.turns))
    answer = one.ask(question, Sampling(case.answer))
    asked = one.turns[-1].question
    if number:
        earlier, since = one.turns[number - 1], len(one.before(number - 1)) + len(one.turns[number - 1].question)
        said = len(earlier.answer) - (earlier.answer[-1] in world.ends)  # an end of turn is the template's
        follows(world, asked if case.raw else torch.cat([before, asked])[since + said :], question)
    fed = torch.cat([before, asked, torch.tensor(answer.ids[:-1], dtype=torch.long)])
    logits = truth(world, index, fed, stored)[-len(answer.ids) :]
    expect_greedy(logits, answer.ids, f"{kind} answer", f"turn {number}, against plain transformers")


def truth(world: World, index: OpenIndex, ids: torch.Tensor, stored: Rows) -> torch.Tensor:
    """Return the logits of token ids that begin with an index's prompt, after the prompt."""
    if world.case.prefill == "dense" and world.case.kv_dtype is None:
        return plain(world, ids)[0]
    return plain_over(world, stored, index.input_ids, ids[len(index.input_ids) :])


def follows(world: World, ids: torch.Tensor, said: str) -> None:
    """Check token ids from an answer's end to the next answer.

    They must be the template's text around a message, or in a conversation without a template the message alone.
    """
    ours = str(world.tokenizer.decode(ids))
    if world.case.raw:
        expect(ours == said, "talk ids", f"{ours!r} says {said!r}")
        return
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": said},
    ]
    rendered = str(world.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    expected = rendered.rpartition(MARK)[2].lstrip()
    expect(ours.lstrip() == expected, "talk ids", f"{ours!r} follows an answer, and {expected!r} in the template")


@deed("messages", 3, asks=False)
def messages(world: World, index: OpenIndex) -> None:
    """Check that the token ids of a conversation's messages, as a server's clients send them, are the template's."""
    case, random = world.case, Random(world.case.more)
    texts = [world.question(0)]
    for number in range(random.choice([0, 1, 1, 2])):
        answer = world.some_text(random.choice([1, 2, 9, 40]), random.randint(0, 10**6))
        texts += [f"{random.choice(EDGES)}{answer}{random.choice(EDGES)}", world.question(number + 1)]
    given = [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]
    ours = torch.cat([index.input_ids, conversation_tokens(index, given)]).tolist()
    whole = _talk_of(world, texts)
    expected = world.tokenizer(whole, add_special_tokens=case.raw).input_ids
    expect(ours == expected, "messages", apart(world, ours, expected))


def _talk_of(world: World, texts: Sequence[str]) -> str:
    """Return the template's text of a conversation about the document; answers are where the model begins them."""
    if world.case.raw:
        return f"{world.document}{''.join(texts)}"
    whole = [f"{world.document}{BETWEEN}{texts[0]}", *texts[1:]]
    marked = [f"{MARK}{number}{MARK}" if number % 2 else text for number, text in enumerate(whole)]
    roles = [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(marked)]

    def rendered(messages: int) -> str:
        given = roles[:messages]
        return str(world.tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))

    found, done, template = "", 0, rendered(len(roles))
    for number in range(1, len(roles), 2):
        found += template[done : len(rendered(number))] + texts[number]
        done = template.index(marked[number]) + len(marked[number])
    return found + template[done:]


@deed("saved", 6, asks=False)
def saved(world: World, index: OpenIndex) -> None:
    """Check that a saved conversation has the conversation's tokens, the rows of a build, and the same next answer."""
    case = world.case
    one = Conversation(index, world.dense(index).config, raw=case.raw)
    stored = stored_rows(world.folder / "index.skv", case.layers)
    for number in range(_turns(world) - 1):
        _turn(world, index, one, number, stored, "talk")
    save_session(
        index, world.folder / "saved.skv", one.turns, one.config, raw=case.raw, special_tokens=False, quiet=True
    )
    other = world.open("saved.skv")
    expect(other.input_ids.tolist() == one.before(len(one.turns)).tolist(), "saved ids", "are not those of the talk")
    question = world.question(2)
    asked = question_ids(other, question, raw=case.raw)
    one.ask(question, Sampling(1))
    expect(asked.tolist() == one.turns[-1].question.tolist(), "saved ids", "of the next question are not the talk's")
    answer = world.dense(other).ask(asked, Sampling(case.answer)).ids
    fed = torch.cat([other.input_ids, asked, torch.tensor(answer[:-1], dtype=torch.long)])
    logits = truth(world, other, fed, stored_rows(world.folder / "saved.skv", case.layers))
    expect_greedy(logits[-len(answer) :], answer, "saved answer", "against plain transformers")


@deed("threads", 3)
def threads(world: World, index: OpenIndex) -> None:
    """Check that threads that use one session at the same time get plain transformers' answers, or are refused."""
    case, checks = world.case, Checks(world, index)
    random = Random(case.more)
    asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(3)]
    everything = takes_everything(world) and random.random() < 0.6
    asker = world.asker(index, "100%", prefill_budget=checks.all_of_a_prefill()) if everything else world.dense(index)
    answers: dict[int, Answer] = {}
    errors: list[BaseException] = []

    def ask(place: int) -> None:
        try:
            answers[place] = asker.ask(asked[place], Sampling(case.answer + 2))
        except SparsekvError:
            pass
        except BaseException as error:
            errors.append(error)

    running = [Thread(target=ask, args=(place,), daemon=True) for place in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join(40)
    if errors:
        raise errors[0]
    expect(not any(one.is_alive() for one in running), "threads", "do not end")
    for place, answer in answers.items():
        fed = torch.cat([asked[place], torch.tensor(answer.ids[:-1], dtype=torch.long)])
        logits = checks.truth(fed)[len(asked[place]) - 1 :]
        expect_greedy(logits, answer.ids, "threads", "an answer beside others against plain transformers")


@deed("tasks", 3)
def tasks(world: World, index: OpenIndex) -> None:
    """Check tasks of one event loop that use one session, some of which are given up early, against plain transformers.

    A second session of the same index may run beside the first.
    """
    case, checks, random = world.case, Checks(world, index), Random(world.case.more)
    asked = [question_ids(index, world.question(place), raw=case.raw) for place in range(4)]
    askers = [world.dense(index)]
    if takes_everything(world):
        askers.append(world.asker(index, "100%", prefill_budget=checks.all_of_a_prefill()))
    patience = [random.choice([0.0, 0.005, 0.02, 60.0]) for _ in asked]

    async def ask(place: int) -> Answer | None:
        await asyncio.sleep(random.choice([0.0, 0.001, 0.01]))
        asker = random.choice(askers)
        answering = asyncio.to_thread(asker.ask, asked[place], Sampling(case.answer + place))
        try:
            return await asyncio.wait_for(answering, patience[place])
        except TimeoutError:
            return None

    async def all_of_them() -> list[Answer | None]:
        answers = await asyncio.gather(*(ask(place) for place in range(len(asked))))
        # Abandoned questions may still run or wait. A question that is asked now comes after them.
        return [*answers, *[await asyncio.to_thread(one.ask, asked[0], Sampling(case.answer)) for one in askers]]

    for place, answer in enumerate(asyncio.run(all_of_them())):
        if answer is not None:
            ids = asked[place] if place < len(asked) else asked[0]
            fed = torch.cat([ids, torch.tensor(answer.ids[:-1], dtype=torch.long)])
            expect_greedy(checks.truth(fed)[len(ids) - 1 :], answer.ids, "tasks", f"answer {place} of tasks")
