"""The rows of earlier turns are kept: the next turn prefills what is new, and its answer is the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.causal_families import families, tiny_config, tiny_model
from support.configs import sparse
from support.engines import answered
from support.served import ALL, OWN, Served, check, ids, question
from support.small_index import INDEXERS, TEXT, build_small, random_ids, reopen, small_plan
from support.tiny_models import build_tiny, tiny_tokenizer
from support.tokenizers_of_families import KINDS, tokenizer_of
from transformers import LlamaConfig

from sparsekv.formats.documents.continuation import BETWEEN
from sparsekv.formats.documents.prompt import encode_prompt, render
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.build import build_index
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.sparse_layer import PackedInPlace, PackedSparse, SparseLayer, divides_questions
from sparsekv.runtime.cache.kept_turns import BLOCK, KeptRows, KeptTurns, TurnStore
from sparsekv.runtime.cache.packed_cache import PackedCache
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.decoding.engine import Engine, Request, Sequence
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.serving.messages import Message, conversation_tokens
from sparsekv.runtime.serving.scheduler import Scheduler
from sparsekv.runtime.serving.stream import Piece

Make = Callable[..., Scheduler]
MARK = "@@@"
SPARSE = sparse("squeezed", ALL.attention.method, Budget(0.1), question=Dense())  # type: ignore[union-attr]
OBSERVING = sparse("snapkv", SnapKV(window_queries=4), Budget(0.1))


def cached(pieces: list[Piece]) -> int:
    """The number of cached tokens behind the document."""
    usage = pieces[-1].usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize("config", [ALL, OWN, DecodeConfig(Dense())], ids=["divided", "own", "dense"])
def test_a_next_turn_prefills_only_what_is_new(served: Served, make: Make, config: DecodeConfig) -> None:
    scheduler, stored = make(slots=2), served.indices["a"].split.tokens
    said, known = question(2), 0
    for number in range(3):
        pieces = list(served.ask(scheduler, "a", said, config=config))
        check(pieces, served.alone("a", said, config=config))
        assert cached(pieces) == stored + known
        known = len(said) + len(ids(pieces)) - 1
        said = torch.cat([said, torch.tensor(ids(pieces)), random_ids(9, seed=number)])
    other = list(served.ask(scheduler, "b", said, config=config))
    check(other, served.alone("b", said, config=config))
    assert cached(other) == served.indices["b"].split.tokens


def test_a_question_continues_the_part_that_is_the_same_where_its_rows_would_be(served: Served, make: Make) -> None:
    scheduler, stored = make(), served.indices["a"].split.tokens
    changed = question(2).clone()
    changed[100] += 1
    for config, known in ((ALL, 100), (OWN, 0)):
        list(served.ask(scheduler, "a", question(2), config=config))
        pieces = list(served.ask(scheduler, "a", changed, config=config))
        check(pieces, served.alone("a", changed, config=config))
        assert cached(pieces) == stored + known
    again = list(served.ask(scheduler, "a", question(2)))
    check(again, served.alone("a", question(2)))
    assert cached(again) == stored + len(question(2)) - 1


@pytest.mark.thinned
@pytest.mark.parametrize("config", [SPARSE, OWN, OBSERVING], ids=["dense prefill", "own prefill", "observing"])
@pytest.mark.parametrize("slots", [1, 4])
def test_turns_are_those_of_a_chat_at_small_budgets_too(
    served: Served, make: Make, config: DecodeConfig, slots: int
) -> None:
    index, scheduler = served.indices["a"], make(slots=slots)
    talk = Conversation(index, replace(config, budget=Budget(0.1)))
    for number in range(3):
        answer = talk.ask(f"Question {number}, of some length?", Sampling(12))
        asked = served.ask(scheduler, "a", talk.last_asked(), 12, replace(config, budget=Budget(0.1)))
        assert ids(list(asked)) == answer.ids


@pytest.mark.parametrize(
    "family",
    [
        one if one == "qwen3_next" else pytest.param(one, marks=pytest.mark.slow)
        for one in ("qwen3_next", "lfm2")
        if one in families()
    ],
)
def test_a_state_is_kept_with_the_rows(tmp_path: Path, family: str) -> None:
    """And a question that several steps take continues its state from one to the next."""
    loaded = LoadedModel(tiny_model(tiny_config(family)), tiny_tokenizer(), f"tiny-{family}", None)
    plan = small_plan(loaded=loaded, methods={"codes": INDEXERS["codes"]})
    build_index(plan, tmp_path / "a.skv")
    served = Served({"a": reopen(plan, tmp_path / "a.skv")})
    config = sparse("codes", Codes(), Budget(1.0), question=Dense())
    scheduler, said = Scheduler(served.indices, slots=3), question(5)
    streams = [served.ask(scheduler, "a", one, config=config) for one in (said, question(0), question(1))]
    for number, stream in enumerate(streams):
        pieces = list(stream)
        check(pieces, served.alone("a", [said, question(0), question(1)][number], config=config))
        if not number:
            first = ids(pieces)
    more = torch.cat([said, torch.tensor(first), question(3)])
    pieces = list(served.ask(scheduler, "a", more, config=config))
    check(pieces, served.alone("a", more, config=config))
    assert cached(pieces) == served.indices["a"].split.tokens + len(said) + len(first) - 1
    part = said[:100]  # whose state is not kept
    pieces = list(served.ask(scheduler, "a", part, config=config))
    check(pieces, served.alone("a", part, config=config))
    assert cached(pieces) == served.indices["a"].split.tokens
    scheduler.close(0)


@pytest.mark.thinned
@pytest.mark.parametrize("config", [ALL, OWN], ids=["divided", "own"])
@pytest.mark.parametrize("packed", [PackedSparse, PackedInPlace])
def test_rows_that_are_read_where_they_lie(
    served: Served, config: DecodeConfig, packed: type[PackedSparse | PackedInPlace]
) -> None:
    """As a GPU's kernels read them; here the same calls in plain torch."""
    index = served.indices["a"]
    cache = index.cache(config)
    layers = [packed(layer, 2) for layer in cache.stored_layers if isinstance(layer, SparseLayer)]
    for layer in layers:
        layer.in_place = True
    turns = KeptTurns(TurnStore(1 << 24), divided=divides_questions(cache.stored_layers))
    engine = Engine(index, PackedCache(cache, [*layers], 2), chunk=40, turns=turns)
    assert engine.chunk == (40 if config is ALL else None)
    asked = [question(number) for number in (0, 4, 2)]
    for _ in range(2):
        answers = answered(engine, asked, Sampling(8))
        for number, one in enumerate(asked):
            assert answers[number].ids == served.alone("a", one, config=config).ids
            asked[number] = torch.cat([one, torch.tensor(answers[number].ids), random_ids(3)])
    assert sum(sequence.kept > 0 for sequence in _continued(engine, asked)) == 3


def _continued(engine: Engine, asked: list[torch.Tensor]) -> list[Sequence]:
    sequences = [engine.sequence(Request(one, Sampling(1))) for one in asked]
    engine.waiting.extend(sequences)
    with engine.running():
        while engine.waiting or engine.active:
            engine.run_step()
    return sequences


def rows(tokens: int) -> KeptRows:
    return KeptRows(tokens, ((torch.zeros(1, tokens, 1), torch.zeros(1, tokens, 1)),))


def test_the_least_recently_used_rows_go_first() -> None:
    store = TurnStore(3 * rows(20).nbytes)
    turns = KeptTurns(store, divided=True)
    kept = [[number] * 20 for number in range(4)]
    for tokens in kept[:3]:
        turns.keep(tokens, lambda: rows(20))
    assert turns.find([*kept[0], 7]) is not None
    turns.keep(kept[3], lambda: rows(20))
    found = [turns.find([*tokens, 7]) for tokens in kept]
    assert [one is not None for one in found] == [True, False, True, True]
    turns.keep([9] * 100, lambda: rows(100))  # more than all
    assert store.nbytes == store.most_bytes
    turns.forget()
    assert store.nbytes == 0
    assert not store._by_hash


def test_tokens_are_compared_not_only_their_hashes() -> None:
    turns = KeptTurns(TurnStore(1 << 20), divided=True)
    other = KeptTurns(turns.store, divided=True)
    turns.keep([*range(30)], lambda: rows(30))
    assert other.find([*range(30)]) is None
    for same in range(31):
        found = turns.find([*range(same), *[99] * 40])
        assert (0 if found is None else found.tokens) == (same if same >= BLOCK else 0)
        if found is not None:
            assert found.rows[0][0].shape[1] == same
    whole = KeptTurns(turns.store, divided=False)
    whole.keep([*range(30)], lambda: rows(30))
    whole.keep([*range(40)], lambda: rows(40))
    tokens = [whole.find([*range(end), 99, 99]) for end in (29, 30, 35, 40, 45)]
    assert [None if one is None else one.tokens for one in tokens] == [None, 30, 30, 40, 40]


def test_messages_have_the_tokens_of_a_chat(served: Served) -> None:
    index, messages = served.indices["a"], list[Message]()
    talk = Conversation(index, ALL)
    for asked in ("What is an expression?", "And why?", "x"):
        answer = talk.ask(asked, Sampling(1))
        messages += [Message("user", asked), Message("assistant", answer.text)]
        found = conversation_tokens(index, messages[:-1])
        if "\ufffd" in "".join(one.content for one in messages[:-1]):
            break  # a byte that is no text has no way back to its token
        assert found.tolist() == talk.last_asked().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_have_the_tokens_of_the_chat_template(kind: str, tmp_path: Path) -> None:
    """A token of the template may take the white space behind it, as Phi-3's does, and the answer then begins a text.

    The answer stands where the model begins it: some templates put a space before an earlier answer.
    """
    tokenizer, texts = tokenizer_of(kind), ("Why?", "Yes. It is so.", "And then?")
    loaded = LoadedModel(build_tiny(LlamaConfig, vocab_size=2048)(), tokenizer, "tiny", None)
    document = TEXT[:400].strip()
    index = build_small(tmp_path / "a.skv", loaded=loaded, prompt=encode_prompt(tokenizer, document))
    roles = "user", "assistant", "user"
    found = conversation_tokens(index, [Message(*one) for one in zip(roles, texts, strict=True)])
    shown = f"{document}{BETWEEN}{texts[0]}", MARK, texts[2]
    messages = [{"role": role, "content": text} for role, text in zip(roles, shown, strict=True)]
    begun, whole = render(tokenizer, messages[:1]), render(tokenizer, messages)
    expected = f"{begun}{texts[1]}{whole.partition(MARK)[2]}"
    assert index.input_ids.tolist() + found.tolist() == tokenizer(expected, add_special_tokens=False).input_ids
