"""Answers that begin from a question's prefill by dense attention are those whose own cache prefills the question."""

from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.engines import count_rows_on_the_device
from support.small_index import INDEXERS, build_small

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.sparse_layer import divides_questions
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import Engine, PrefilledQuestion, Request, generate, pack, prefill_question
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.selection.interface import Budget, methods

QUESTIONS = ("What is an expression?", "x", "Which statement is it that raises an exception, and when?")
GREEDY = Sampling(max_new_tokens=8)


def _same(index: OpenIndex, config: DecodeConfig, *, together: int = 0) -> None:
    """Compare answers and KV fractions, one by one, or in batches of `together`."""
    asked = [question_ids(index, question) for question in QUESTIONS]
    prefilled = [prefill_question(index, index.dense_cache(), one) for one in asked]
    cache = index.cache(config)
    assert divides_questions(cache.stored_layers)
    own = _answers(index, cache, asked, [None] * len(asked), together)
    shared = _answers(index, cache, asked, [*prefilled], together)
    assert shared == own
    assert max(len(ids) for ids, _ in own) == GREEDY.max_new_tokens  # an EOS token may end some of them


def _answers(
    index: OpenIndex, cache: IndexCache, asked: list[torch.Tensor], kept: list[PrefilledQuestion | None], together: int
) -> list[tuple[list[int], float]]:
    if not together:
        each = (generate(index, cache, one, GREEDY, prefilled=of) for one, of in zip(asked, kept, strict=True))
        return [(one.ids, one.kv_fraction) for one in each]
    requests = [Request(one, GREEDY, prefilled=of) for one, of in zip(asked, kept, strict=True)]
    found = dict(Engine(index, pack(cache, together)).answers(requests))
    return [(found[number].ids, found[number].kv_fraction) for number in range(len(asked))]


UNITING = sorted(name for name, method in methods().items() if name != "snapkv" and method().can_unite())
"""Methods that answer in batches, but SnapKV, which ranks tokens by the question's queries."""


@pytest.mark.parametrize("name", UNITING)
def test_each_method_in_a_batch(full_index: OpenIndex, name: str) -> None:
    _same(full_index, sparse(name, methods()[name](), Budget(0.1), question=Dense()), together=2)


def test_each_family(family_index: OpenIndex) -> None:
    """Dense and sparse layers, sliding windows, learned sinks."""
    config = sparse("squeezed", methods()["squeezed"](), Budget(0.1), question=Dense())
    for together in (0, 2):
        _same(family_index, config, together=together)
        _same(family_index, DecodeConfig(Dense()), together=together)


def test_steps_as_a_gpu_takes_them(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    count_rows_on_the_device(monkeypatch)
    _same(index, sparse("squeezed", methods()["squeezed"](), Budget(0.1), question=Dense()))


def test_int8_rows(tmp_path: Path) -> None:
    index = build_small(tmp_path / "int8.skv", methods={"codes": INDEXERS["codes"]}, kv_dtype="int8")
    for name in ("codes", "quest"):
        _same(index, sparse(name, methods()[name](), Budget(0.1), question=Dense()))


def test_a_method_that_needs_the_questions_queries_prefills_it_itself(full_index: OpenIndex) -> None:
    """So does one whose steps share a search, and one whose questions select by themselves."""
    budget = Budget(0.1)
    for config in (
        sparse("snapkv", methods()["snapkv"](), budget, question=Dense()),
        sparse("csattention", CSAttention(step=3), budget, question=Dense()),
        sparse("quest", methods()["quest"](), budget),
    ):
        assert not divides_questions(full_index.cache(config).stored_layers)


def test_a_question_without_a_position_for_its_answer_is_refused(index: OpenIndex) -> None:
    question = index.input_ids[:1].repeat(index.model.config.max_position_embeddings)
    with pytest.raises(UsageError, match="ask a shorter question"):
        prefill_question(index, index.dense_cache(), question)
