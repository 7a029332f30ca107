"""A question of one token is prefilled like any other: the caller says what is a question, not the number of tokens."""

import sys
from collections.abc import Iterator

import pytest
import torch
from support.configs import sparse
from support.engines import answered, packed
from support.plain_talk import plain_answer
from support.random_tensors import normal
from support.reference import assert_close
from support.small_index import plain_logits_after, random_ids, stepped_logits
from support.small_layer import as_queries

from sparsekv.kernels.common import on_cpu
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Answer, Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Conversation
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec

FEW = Budget(0.05)
PREFILL = Dense()
METHODS: dict[str, Method] = {
    "codes": Codes(),
    "squeezed": Squeezed(),
    "multipole": Multipole(stream=True, buffer=8),
    "quest": Quest(page_size=4),
    "snapkv": SnapKV(window_queries=4),
    "lessismore": LessIsMore(),
    "csattention": CSAttention(step=4),
}


@pytest.fixture(params=["numba", "torch"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU's steps by compiled kernels, and by torch alone as where numba is not installed."""
    on_cpu.compiled_kernels.cache_clear()
    if request.param == "torch":
        for name in ("code_step_numba", "cluster_step_numba"):
            monkeypatch.setitem(sys.modules, f"sparsekv.kernels.attention.{name}", None)
    yield
    on_cpu.compiled_kernels.cache_clear()


def _cache(index: OpenIndex, name: str, budget: Budget = FEW, **options: object) -> IndexCache:
    return index.cache(sparse(name, METHODS[name], budget, question=PREFILL, **options))  # type: ignore[arg-type]


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("name", METHODS)
def test_its_logits_are_the_plain_models_whatever_the_budget(full_index: OpenIndex, name: str) -> None:
    tokens = random_ids(1)
    logits = stepped_logits(full_index, _cache(full_index, name), tokens, question=1)
    assert_close(logits, plain_logits_after(full_index, tokens).double(), 1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_in_pieces_of_one_token_is_prefilled_to_its_end(full_index: OpenIndex, name: str) -> None:
    """Nothing is counted, appended or searched ahead meanwhile; the next token is a decode step."""
    tokens, cache = random_ids(24), _cache(full_index, name)
    sparse = [layer for layer in cache.stored_layers if isinstance(layer, SparseLayer)]
    expected = plain_logits_after(full_index, tokens[:23]).double()
    cache.expect_prompt(full_index.split.tokens + 23)
    with torch.inference_mode(), route_attention(full_index.model, cache.attend):
        found = [
            full_index.model(input_ids=part[None], past_key_values=cache, use_cache=True).logits[0]
            for part in tokens[:23].split([9, 1, 12, 1])
        ]
        assert_close(torch.cat(found), expected, 1e-4)
        assert [layer.plan.read.dense for layer in sparse] == [0] * len(sparse)
        assert [layer.stored for layer in sparse] == [full_index.split.tokens] * len(sparse)
        full_index.model(input_ids=tokens[None, 23:], past_key_values=cache, use_cache=True)
    assert all(layer.plan.read.dense > 0 for layer in sparse)
    assert all(layer.stored > full_index.split.tokens for layer in sparse) == (name == "multipole")


@pytest.mark.parametrize("options", [{"gauge": True}, {"guard": Guard(0.2)}, {"ahead": True}], ids=str)
def test_what_watches_decode_steps_does_not_see_it(full_index: OpenIndex, options: dict[str, object]) -> None:
    cache = _cache(full_index, "squeezed", **options)
    stepped_logits(full_index, cache, random_ids(1), question=1)
    for layer in cache.stored_layers:
        assert isinstance(layer, SparseLayer)
        assert layer.plan.meter is None or layer.plan.meter.heads == 0
        assert layer.plan.prefetcher is None or layer.plan.prefetcher.pending is None


@pytest.mark.usefixtures("steps")
def test_it_is_answered_alone_and_in_a_batch_as_by_the_plain_model(full_index: OpenIndex) -> None:
    """Every token at a full budget; the first at a small one, since the question is prefilled densely."""
    asked = [torch.tensor([token]) for token in (65, 32, 120)]
    asked.insert(1, question_ids(full_index, "Why?"))
    plain = [plain_answer(full_index, torch.cat([full_index.input_ids, question]), tokens=6) for question in asked]
    for budget, tokens in ((Budget(1.0), 6), (FEW, 1)):
        cache, sampling = _cache(full_index, "codes", budget), Sampling(max_new_tokens=6)
        expected = [ids[:tokens] for ids in plain]
        alone = [generate(full_index, cache, question, sampling) for question in asked]
        assert [one.ids[:tokens] for one in alone] == expected
        for slots in (1, 3):
            found = answered(packed(full_index, cache, slots), asked, sampling)
            assert [found[number].ids[:tokens] for number in range(len(asked))] == expected


@pytest.mark.parametrize("name", ["snapkv", "quest", "codes", "squeezed"])
@pytest.mark.parametrize("prefill", [None, PREFILL], ids=["own", "dense"])
def test_a_batch_of_one_answers_it_as_it_does_alone(
    full_index: OpenIndex, name: str, prefill: Dense | Own | QuestionPrefill
) -> None:
    """Where the answer's method selects for the question, by its choice for questions."""
    method = Squeezed(selection="threshold") if name == "squeezed" else METHODS[name]
    cache = full_index.cache(sparse(name, method, Budget(0.1), question=prefill))
    asked, sampling = [torch.tensor([token]) for token in (65, 32, 120)], Sampling(max_new_tokens=6)
    alone: list[Answer] = [generate(full_index, cache, question, sampling) for question in asked]
    found = answered(packed(full_index, cache, 1), asked, sampling)
    assert [found[number].ids for number in range(3)] == [one.ids for one in alone]
    assert [found[number].kv_fraction for number in range(3)] == pytest.approx([one.kv_fraction for one in alone])


@pytest.mark.usefixtures("steps")
def test_turns_of_one_token_are_prefilled_also_under_another_setting(full_index: OpenIndex) -> None:
    """With answers of one token nothing is decoded, so that every answer is the plain model's at any budget."""
    sampling, said = Sampling(max_new_tokens=1), full_index.input_ids
    talk = Conversation(
        full_index, DecodeConfig(MethodSpec("codes", "", Codes(), False), FEW, question=PREFILL), raw=True
    )
    for number, question in enumerate("abcd"):
        if number == 3:
            talk.switch(DecodeConfig(MethodSpec("quest", "", Quest(), False), FEW, question=PREFILL))
        said = torch.cat([said, full_index.tokenizer(question, return_tensors="pt").input_ids[0]])
        expected = plain_answer(full_index, said, tokens=1)
        assert talk.ask(question, sampling).ids == expected
        said = torch.cat([said, torch.tensor(expected)])
    assert [len(turn.tokens) for turn in talk.turns] == [2] * 4


def test_where_questions_choose_together_it_has_a_questions_threshold(full_index: OpenIndex) -> None:
    """One choice for a question's token and one for an answer's, as each makes it alone."""
    cache = full_index.cache(sparse("squeezed", Squeezed(selection="threshold"), Budget(0.1)))
    layer = cache.stored_layers[0]
    assert isinstance(layer, SparseLayer)
    selector, one = layer.plan.selector, torch.tensor([1], dtype=torch.int32)
    choose_together = selector.kernels and selector.kernels.choose_together
    assert choose_together is not None
    query, chosen = normal(0, 2, 2, 1, 16), {}
    for asks in (False, True):
        queries = as_queries(query, joint=asks)
        together = choose_together(queries, one, torch.tensor([asks]), Budget(0.1), None)
        chosen[asks] = selector.select(queries, Budget(0.1)).rows.lengths.sum(-1).flatten().tolist()
        assert together.rows.lengths.sum(-1).flatten().tolist() == chosen[asks]
    assert chosen[False] != chosen[True]
