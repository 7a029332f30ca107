"""Questions that decode together: with everything attended their answers are those that each gets alone."""

import random
from dataclasses import dataclass, replace
from itertools import permutations, product
from types import SimpleNamespace

import pytest
import torch
from support.configs import sparse
from support.engines import answered, packed
from support.odd_numbers import logits_full_of
from support.random_tensors import normal
from support.reference import assert_close
from support.short_part import short_part

from sparsekv.formats.errors import SparsekvError
from sparsekv.kernels.attention.attention import OwnRows, Segment, shared_attention
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.runtime.attention.config import Dense, Own, QuestionPrefill
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.attention.sparse_layer import PackedInPlace, PackedSparse, SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.cache.packed_cache import PackedCache, PackedStep, Piece
from sparsekv.runtime.decoding.answer import Answer, Sampling, question_ids
from sparsekv.runtime.decoding.engine import Engine, Request, generate, why_alone
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.lessismore import LessIsMore
from sparsekv.runtime.methods.magicpig import MagicPIG
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.oracle import Oracle, OracleSelector
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.tidaldecode import TidalDecode
from sparsekv.runtime.selection.interface import Budget, ConversationState, Method, MethodSpec, MiddleContext, Queries

QUESTIONS = (
    "What is an expression?",
    "x",
    "Which statement is it that raises an exception, and when?",
    "Why?",
    "And how?",
)
METHODS: dict[str, Method] = {
    "squeezed": Squeezed("hierarchical"),
    "multipole": Multipole(),
    "quest": Quest(page_size=4),
    "snapkv": SnapKV(window_queries=4),
    "tidaldecode": TidalDecode(),
    "lessismore": LessIsMore(),
    "pqcache": PQCache(rerank=2.0),
    "csattention": CSAttention(),
    "codes": Codes(),
}
every_second_method = pytest.mark.parametrize("name", short_part(METHODS, every=2))
GREEDY = Sampling(max_new_tokens=6)
DENSE = Dense()


def sparse_layers(cache: IndexCache) -> list[SparseLayer]:
    return [layer for layer in cache.stored_layers if isinstance(layer, SparseLayer)]


def alone(index: OpenIndex, cache: IndexCache, asked: list[torch.Tensor], sampling: Sampling = GREEDY) -> list[Answer]:
    return [generate(index, cache, one, sampling) for one in asked]


def together(
    index: OpenIndex, cache: IndexCache, asked: list[torch.Tensor], slots: int, sampling: Sampling = GREEDY
) -> list[Answer]:
    found = answered(packed(index, cache, slots), asked, sampling)
    assert sorted(found) == list(range(len(asked)))
    return [found[number] for number in range(len(asked))]


def ids(answers: list[Answer]) -> list[list[int]]:
    return [one.ids for one in answers]


def test_each_family_answers_as_it_does_one_by_one(family_index: OpenIndex) -> None:
    """Sliding windows, soft caps, learned sinks, layers without positions; uneven questions, more than fit at once."""
    asked = [question_ids(family_index, question) for question in QUESTIONS[:3]]
    cache = family_index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    expected = alone(family_index, cache, asked)
    assert ids(together(family_index, cache, asked, 2)) == ids(expected)
    dense = family_index.dense_cache()
    assert ids(together(family_index, dense, asked, 2)) == ids(alone(family_index, dense, asked))


@pytest.mark.thinned
@every_second_method
@pytest.mark.parametrize("residual", [False, True], ids=["dropped", "residual"])
def test_each_method_answers_as_it_does_one_by_one(full_index: OpenIndex, name: str, residual: bool) -> None:
    asked = [question_ids(full_index, question) for question in QUESTIONS[:3]]
    cache = full_index.cache(sparse(name, METHODS[name], Budget(1.0), residual=residual))
    expected = alone(full_index, cache, asked)
    found = together(full_index, cache, asked, 2)
    assert ids(found) == ids(expected)
    assert [one.prompt_tokens for one in found] == [one.prompt_tokens for one in expected]


@pytest.mark.thinned
@every_second_method
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("prefill", [Own(), DENSE], ids=["", "prefilled densely"])
def test_steps_of_many_answers_attend_to_everything(
    full_index: OpenIndex, name: str, in_place: bool, prefill: Dense | Own
) -> None:
    """From two answers on: one that answers on after the others have ended selects again."""
    asked = [question_ids(full_index, question) for question in QUESTIONS[:3]]
    config = sparse(name, METHODS[name], Budget(0.1), question=prefill)

    def engine(dense_from: int | None) -> Engine:
        made = packed(full_index, full_index.cache(replace(config, dense_from=dense_from)), 3)
        assert isinstance(made.cache, PackedCache)
        for layer in made.cache.packed:
            assert isinstance(layer, PackedSparse)
            layer.in_place = in_place
        return made

    always = answered(engine(1), asked, GREEDY)
    assert all(answer.kv_fraction == 1 for answer in always.values())
    if prefill == DENSE:
        dense = together(full_index, full_index.dense_cache(), asked, 3)
        assert [always[number].ids for number in range(3)] == ids(dense)
    never, from_four = (answered(engine(least), asked, GREEDY) for least in (None, 4))
    assert {number: one.ids for number, one in from_four.items()} == {number: one.ids for number, one in never.items()}
    longer = [Request(one, Sampling(max_new_tokens=number)) for one, number in zip(asked, (3, 3, 9), strict=True)]
    last = dict(engine(2).answers(longer))[2]
    assert (last.kv_fraction == 1) == (never[2].kv_fraction == 1)


@every_second_method
def test_a_batch_of_one_chooses_what_a_question_alone_does(full_index: OpenIndex, name: str) -> None:
    """At a small budget too, and whatever was asked before."""
    asked = [question_ids(full_index, question) for question in QUESTIONS[:3]]
    cache = full_index.cache(sparse(name, METHODS[name], Budget(0.1)))
    expected = alone(full_index, cache, asked)
    found = together(full_index, cache, asked, 1)
    assert ids(found) == ids(expected)
    if name != "squeezed":  # whose rest is at the finest level, and its hierarchical reads depend on the batch
        assert [one.kv_fraction for one in found] == pytest.approx([one.kv_fraction for one in expected], rel=0.02)


def test_the_order_of_questions_does_not_matter_where_everything_is_read(index: OpenIndex) -> None:
    asked = [question_ids(index, question) for question in QUESTIONS]
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    expected = ids(together(index, cache, asked, 2))
    for order in random.Random(0).sample(list(permutations(range(len(asked)))), 3):
        assert ids(together(index, cache, [asked[one] for one in order], 3)) == [expected[one] for one in order]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_does_not_matter_where_rows_lie(full_index: OpenIndex, placement: str) -> None:
    asked = [question_ids(full_index, question) for question in QUESTIONS]
    caches = [
        full_index.cache(sparse("quest", Quest(page_size=4), Budget(0.2), residual=True, placement=place))
        for place in ("device", placement)
    ]
    first, second = (ids(together(full_index, cache, asked, 4)) for cache in caches)
    assert first == second


@pytest.mark.thinned
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("residual", "prefill"), product([False, True], [Own(), DENSE]), ids=str)
def test_rows_that_are_read_where_they_lie_are_those_that_are_copied(
    full_index: OpenIndex, name: str, residual: bool, prefill: Dense | Own | QuestionPrefill
) -> None:
    """As a GPU's kernels read them; here the same calls in plain torch. No question ever answers alone, for which a CPU
    has other kernels, that read other rows of a rest."""
    asked = [question_ids(full_index, question) for question in QUESTIONS[:3]]
    cache = full_index.cache(sparse(name, METHODS[name], Budget(0.2), residual=residual, question=prefill))
    copied, in_place = (packed(full_index, cache, 3) for _ in range(2))
    assert isinstance(in_place.cache, PackedCache)
    for layer in in_place.cache.packed:
        assert isinstance(layer, PackedSparse)
        assert not layer.in_place
        layer.in_place = True
    first, second = (answered(engine, asked, GREEDY) for engine in (copied, in_place))
    assert {number: one.ids for number, one in second.items()} == {number: one.ids for number, one in first.items()}
    assert [second[n].kv_fraction for n in first] == pytest.approx([one.kv_fraction for one in first.values()])


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("squeezed", Squeezed()),
        ("squeezed", Squeezed(selection="threshold")),
        ("multipole", Multipole()),
        ("multipole", Multipole(replace=False)),
    ],
    ids=["squeezed", "by threshold", "multipole", "without replacement"],
)
@pytest.mark.parametrize("prefill", [Own(), DENSE], ids=["", "prefilled densely"])
def test_questions_that_choose_together(
    full_index: OpenIndex, name: str, method: Method, prefill: Dense | Own | QuestionPrefill
) -> None:
    """As kernels on a GPU choose and attend; here the same calls in plain torch."""
    asked = [question_ids(full_index, question) for question in QUESTIONS]
    cache = full_index.cache(sparse(name, method, Budget(1.0), question=prefill))
    layers = [PackedInPlace(layer, 3) for layer in sparse_layers(cache)]
    for layer in layers:
        layer.in_place = True
    engine = Engine(full_index, PackedCache(cache, [*layers], 3))
    found, expected = answered(engine, asked, GREEDY), together(full_index, cache, asked, 3)
    assert [found[number].ids for number in range(len(asked))] == ids(expected)
    read = [found[number].kv_fraction for number in range(len(asked))]
    assert read == pytest.approx([one.kv_fraction for one in expected], rel=0.05)


@pytest.mark.parametrize("method", [Multipole(), Multipole(replace=False)], ids=["multipole", "without replacement"])
def test_all_tokens_attend_to_what_any_sequence_chooses(full_index: OpenIndex, method: Method) -> None:
    cache = full_index.cache(sparse("multipole", method, Budget(0.1)))
    stored = sparse_layers(cache)[0]
    layer, selector = PackedInPlace(stored, 3), stored.plan.selector
    choose_together = selector.kernels and selector.kernels.choose_together
    assert choose_together is not None
    (Hk, _, D), G = stored.exact[0].shape, 4
    step = PackedStep(
        slots=torch.tensor([0, 0, 0, 1, 2, 2]),
        rows=torch.tensor([0, 1, 2, 0, 0, 1]),
        ends=torch.tensor([3, 4, 6], dtype=torch.int32),
        single=torch.tensor([3]),
        pieces=(Piece(0, 0, 3), Piece(2, 4, 2)),
        longest=3,
    )
    query, keys, values = normal(0, 6, Hk * G, D).transpose(0, 1), normal(1, Hk, 6, D), normal(2, Hk, 6, D)
    output = layer.attend(AttentionCall(0, query, keys, values, D**-0.5, None, None, None), step)
    queries = Queries(query.unflatten(0, (Hk, G)), step.rows.clone, step.rows.clone, joint=False)
    chosen = choose_together(queries, step.ends, step.everyone.asks, Budget(0.1), None)
    rows, valid = chosen.rows.expand()
    assert 0 < int(chosen.rows.lengths.sum(-1).min()) < stored.plan.middle.used
    segments = [Segment(*stored.plan.middle.gather(rows[:, 0]), None if valid is None else valid[:, None])]
    segments += [Segment(*stored.exact)]
    segments += [Segment(one.keys, one.values, bias=one.log_counts[:, None]) for one in chosen.attended_segments()]
    own = OwnRows(layer.own.keys, layer.own.values, step.slots, torch.zeros_like(step.rows), step.rows + 1)
    expected = shared_attention(queries.query, segments, own, D**-0.5)
    assert_close(output, expected.flatten(0, 1), 1e-5)


def test_a_question_that_another_method_prefills(full_index: OpenIndex) -> None:
    asked = [question_ids(full_index, question) for question in QUESTIONS]
    cache = full_index.cache(sparse("snapkv", SnapKV(window_queries=4), Budget(0.2), question=DENSE))
    assert ids(together(full_index, cache, asked, 1)) == ids(alone(full_index, cache, asked))


def test_a_question_of_one_token_answers_as_it_does_alone(full_index: OpenIndex) -> None:
    """It has no window of queries to observe, and takes none over from whoever had its slot before it."""
    words = [question_ids(full_index, question, raw=True) for question in QUESTIONS]
    asked = [words[0], words[1][:1], words[2], words[3][:1], words[4][:1]]
    cache = full_index.cache(sparse("snapkv", SnapKV(window_queries=4), Budget(0.2)))
    assert ids(together(full_index, cache, asked, 1)) == ids(alone(full_index, cache, asked))


class _Remembering(OracleSelector):
    """The oracle, as a method of another package whose choice may also depend on the question."""

    @property
    def conversation(self) -> ConversationState:
        return ConversationState(lambda: None)


@dataclass(frozen=True)
class _Remembered(Oracle):
    def prepare(self, context: MiddleContext) -> _Remembering:
        return _Remembering(context)


def test_each_sequence_selects_by_its_own_query(full_index: OpenIndex) -> None:
    asked = [question_ids(full_index, question) for question in QUESTIONS]
    found, expected = (
        together(full_index, full_index.cache(sparse("oracle", method, Budget(0.05), question=DENSE)), asked, 3)
        for method in (_Remembered(), Oracle())
    )
    assert ids(found) == ids(expected)
    assert [one.kv_fraction for one in found] == pytest.approx([one.kv_fraction for one in expected])


def test_what_is_drawn_is_drawn_for_each_question(index: OpenIndex) -> None:
    asked = [question_ids(index, question) for question in QUESTIONS]
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    drawn = replace(GREEDY, temperature=1.3, top_k=30, top_p=0.9, seed=5)
    found = ids(together(index, cache, asked, 3, drawn))
    assert found == ids(alone(index, cache, asked, drawn))
    assert found != ids(together(index, cache, asked, 3))


def test_an_answer_that_ends_makes_room(index: OpenIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [question_ids(index, question) for question in QUESTIONS]
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    whole = ids(together(index, cache, asked, 2))
    monkeypatch.setattr(index.model.generation_config, "eos_token_id", whole[2][4])
    expected = ids(alone(index, cache, asked))
    assert len(expected[2]) <= 5
    assert ids(together(index, cache, asked, 2)) == expected


def test_more_tokens_than_the_first_rows_have_room_for(index: OpenIndex) -> None:
    asked = [question_ids(index, question) for question in QUESTIONS[:2]]
    long, cache = replace(GREEDY, max_new_tokens=90), index.cache(sparse("squeezed", Squeezed(), Budget(1.0)))
    assert ids(together(index, cache, asked, 2, long)) == ids(alone(index, cache, asked, long))


def test_a_batch_reads_what_its_questions_share_once(full_index: OpenIndex) -> None:
    asked = [question_ids(full_index, QUESTIONS[0])] * 4
    cache = full_index.cache(sparse("quest", Quest(page_size=4), Budget(0.1)))
    one = alone(full_index, cache, asked[:1])[0]
    assert [answer.kv_fraction for answer in together(full_index, cache, asked, 4)] == pytest.approx(
        [one.kv_fraction] * 4
    )


def test_logits_that_are_no_numbers_are_told(index: OpenIndex) -> None:
    cache = index.cache(sparse("squeezed", Squeezed(), Budget(0.2)))
    with logits_full_of(index.model, torch.nan), pytest.raises(SparsekvError, match="logits are not finite"):
        together(index, cache, [question_ids(index, QUESTIONS[0])] * 2, 2)


@pytest.mark.parametrize(
    ("name", "method", "changes"),
    [
        ("magicpig", MagicPIG(), {}),
        ("sparq", SparQ(mean_value=True), {}),
        ("csattention", CSAttention(step=2), {}),
        ("multipole", Multipole(stream=True, buffer=8), {}),
        ("multipole", Multipole(), {"guard": Guard(0.2)}),
        ("multipole", Multipole(), {"gauge": True}),
        ("quest", Quest(), {"ahead": True}),
    ],
)
def test_some_things_cannot_be_shared(
    full_index: OpenIndex, name: str, method: Method, changes: dict[str, object]
) -> None:
    cache = full_index.cache(sparse(name, method, Budget(0.2), **changes))  # type: ignore[arg-type]
    assert why_alone(full_index, MethodSpec(name, "", method), cache)


def test_keys_that_turn_by_a_sequences_length_cannot_be_shared(index: OpenIndex) -> None:
    cache, manifest = index.cache(sparse("squeezed", Squeezed(), Budget(0.2))), index.artifact.manifest
    assert not why_alone(index, MethodSpec("squeezed", "", Squeezed()), cache)
    rope = manifest.rope.model_copy(update={"parameters": {"rope_type": "dynamic", "factor": 2.0}})
    turned = SimpleNamespace(artifact=SimpleNamespace(manifest=manifest.model_copy(update={"rope": rope})))
    assert "RoPE depends on a sequence's length" in why_alone(turned, MethodSpec("squeezed", "", Squeezed()), cache)  # type: ignore[arg-type]
