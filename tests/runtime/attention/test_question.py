"""A question prefilled by another method than its answer: what it attends to, and what the answer then does."""

from pathlib import Path

import pytest
import torch
from support.choices import recorded_choices
from support.coded_layer import coded_layer
from support.configs import sparse
from support.engines import answered, packed
from support.kernel_runs import DEVICE
from support.reference import assert_close
from support.small_index import INDEXERS, build_small, plain_logits, random_ids, stepped_logits
from support.small_layer import as_queries, small_layer

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.attention.plan import QuestionSearch
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import MappedRows
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.quoka import Quoka
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.selection.interface import Budget, Method, Queries

DENSE, OWN = Dense(), Own()


def _cache(
    index: OpenIndex, method: Method, question: Dense | Own | QuestionPrefill, budget: float = 1.0
) -> IndexCache:
    return index.cache(sparse(type(method).__name__.lower(), method, Budget(budget), question=question))


@pytest.mark.thinned
@pytest.mark.parametrize("chunk_size", [1, 5, 100])
@pytest.mark.parametrize("name", ["dense", "quoka", "squeezed"])
def test_with_everything_attended_a_question_is_the_plain_models(
    family_index: OpenIndex, name: str, chunk_size: int
) -> None:
    method = {"quoka": Quoka(), "squeezed": Squeezed()}.get(name)
    question = DENSE if method is None else QuestionPrefill(name, method, Budget(1.0), chunk_size)
    tokens = random_ids(15)
    plain = plain_logits(family_index.model, torch.cat([family_index.input_ids, tokens]))[-15:]
    # The answer's rows lie cluster by cluster: what the question's method chooses has to be found there.
    logits = stepped_logits(family_index, _cache(family_index, Squeezed(), question), tokens, question=11)
    assert_close(logits, plain, 1e-4)


def test_a_dense_question_is_followed_by_a_sparse_answer(index: OpenIndex) -> None:
    tokens = random_ids(15)
    plain = plain_logits(index.model, torch.cat([index.input_ids, tokens]))[-15:]
    logits = stepped_logits(index, _cache(index, Window(), DENSE), tokens, question=11)
    assert_close(logits[:11], plain[:11], 1e-4)
    assert not torch.allclose(logits[11:], plain[11:], atol=1e-3)


def test_each_chunk_of_a_question_chooses_for_itself() -> None:
    layer = small_layer(middle=60)
    selector = Quoka().prepare(layer.context)
    order = layer.context.tensors["token_order"]
    search = QuestionSearch(QuestionPrefill("quoka", Quoka(), Budget(7)), selector, torch.device("cpu"), order)
    for first in (0, 8):
        one = as_queries(layer.queries[:, :, first : first + 8], joint=True)
        rows = search.select(one).rows.starts
        expected = selector.select(one, Budget(7)).rows.starts
        tokens = order[:, None].gather(-1, rows)
        assert torch.equal(tokens.sort(-1).values, expected.sort(-1).values)


def test_chunks_are_as_long_as_asked_and_see_what_is_before_them(index: OpenIndex) -> None:
    question = QuestionPrefill("quoka", Quoka(), Budget(9), 4)
    cache = _cache(index, Squeezed(), question, 0.2)
    searched = [layer.plan.prefill.search.selector for layer in cache.stored_layers if isinstance(layer, SparseLayer)]
    seen: list[Queries] = []
    with pytest.MonkeyPatch.context() as patch:
        select = searched[0].select
        patch.setattr(searched[0], "select", lambda one, budget: seen.append(one) or select(one, budget))
        stepped_logits(index, cache, random_ids(12), question=10)
    places = [(one.positions() - index.split.tokens).tolist() for one in seen]
    assert places == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(one.joint for one in seen)


def test_a_method_that_keeps_what_a_question_attends_to_sees_it(index: OpenIndex) -> None:
    tokens = random_ids(12)
    told, own = _cache(index, SnapKV(), DENSE, 0.1), _cache(index, SnapKV(), OWN, 0.1)
    with recorded_choices(told) as told_choices, recorded_choices(own) as own_choices:
        stepped_logits(index, told, tokens, question=10)
        stepped_logits(index, own, tokens, question=10)
    # The first layer's question is the same either way, so what it keeps is too.
    assert told_choices[0][0].tokens == own_choices[0][1].tokens


@pytest.mark.parametrize("question", [OWN, DENSE], ids=["its own", "dense"])
def test_questions_together_do_not_lay_out_rows_that_are_gathered(
    index: OpenIndex, question: Dense | Own | QuestionPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they stay where the files are mapped."""

    def refuse(rows: MappedRows) -> None:
        raise AssertionError("rows were laid out in memory")

    monkeypatch.setattr(MappedRows, "_in_memory", refuse)
    engine = packed(index, _cache(index, Quest(page_size=4), question, 0.2), 3)
    asked = [question_ids(index, text) for text in ("What is an expression?", "Why?")]
    assert all(answer.generated_tokens for answer in answered(engine, asked, Sampling(max_new_tokens=4)).values())


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="--chunk-size 0: give at least 1"):
        QuestionPrefill("quoka", Quoka(), Budget(1.0), 0)


@pytest.mark.parametrize("budget", [0.02, 0.04])
def test_a_question_reads_together_what_its_tokens_would_one_by_one(tmp_path: Path, budget: float) -> None:
    """A piece of 32 tokens at 4% has everything, and what is left of 40 tokens has not; nor has either at 2%."""
    index, tokens = build_small(tmp_path / "small.skv", methods={"codes": INDEXERS["codes"]}), random_ids(42)
    plain = plain_logits(index.model, torch.cat([index.input_ids, tokens]))[-42:]
    logits = stepped_logits(index, index.cache(sparse("codes", Codes(), Budget(budget))), tokens, question=40)
    exact = torch.isclose(logits, plain, rtol=1e-3, atol=1e-3).all(-1)
    assert bool(exact[:32].all()) == (budget == 0.04)
    assert not bool(exact[32:].any())


def test_a_prefill_of_its_own_budget_is_the_chunks() -> None:
    """Whatever the method's tokens would read one by one."""
    layer, context = coded_layer(300)
    selector = Codes().prepare(context)
    search = QuestionSearch(QuestionPrefill("codes", Codes(), Budget(7)), selector, DEVICE, None)
    assert search.select(as_queries(layer.queries.to(DEVICE), joint=True)).rows.capacity == 7
