"""The queries of a report: the held-out half of the tail, or a person's questions as the model asks them."""

import torch
from support.reference import assert_close, reference_attention
from support.small_index import attention_outputs

from sparsekv.runtime.decoding.answer import question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.reporting.questions import question_queries
from sparsekv.runtime.reporting.recall import MeasuredQueries, QueryBlock, tail_block

QUESTIONS = ["What is an atom?", "Which statements are simple, and which are compound statements?"]


def _attention(index: OpenIndex, layer: int, block: QueryBlock) -> torch.Tensor:
    """Dense attention [Q, Hq * D] of a block's queries, by what the block says that they see."""
    artifact = index.artifact
    facts, split = artifact.manifest.layers[layer], artifact.manifest.split
    keys, values = (
        torch.cat([stored, new], 1)
        for stored, new in zip(artifact.context(layer), (block.keys, block.values), strict=True)
    )
    before_tail = split.sinks + split.middle
    mask = torch.arange(keys.shape[1]) < before_tail + block.visible[:, None]
    output = reference_attention(
        block.queries.unflatten(0, (keys.shape[0], -1)),
        keys,
        values,
        facts.softmax_scale,
        mask=mask,
        softcap=facts.softcap,
        sink_logits=None if block.sink_logits is None else block.sink_logits.view(keys.shape[0], -1),
    )
    return output.flatten(0, 1).transpose(0, 1).flatten(1)


def test_questions_attend_as_the_model_does_when_it_is_asked(family_index: OpenIndex) -> None:
    queries = question_queries(family_index, QUESTIONS)
    for number, question in enumerate(QUESTIONS):
        ids = question_ids(family_index, question)
        outputs = attention_outputs(family_index.model, torch.cat([family_index.input_ids, ids]))
        for layer in family_index.artifact.manifest.indexed_layers:
            block = list(queries.blocks(layer))[number]
            assert_close(outputs[layer][-len(ids) :], _attention(family_index, layer, block), 1e-4)
    assert len(queries) == sum(len(question_ids(family_index, question)) for question in QUESTIONS)


def test_of_questions_that_end_alike_the_last_tokens_that_differ_are_measured(index: OpenIndex) -> None:
    """Else all would be measured on the same token, with which a chat template ends, and seem to choose alike."""
    questions = ["What is an atom of it?", "Which statements are simple of it?"]
    ids = [question_ids(index, question) for question in questions]
    backwards = zip(*(reversed(one.tolist()) for one in ids), strict=False)
    same = next(number for number, (one, other) in enumerate(backwards) if one != other)
    at = [len(one) - 1 - same for one in ids]
    assert same >= len(" of it?")
    all_of_them = question_queries(index, questions).blocks(0)
    (measured,) = question_queries(index, questions, last=True).blocks(0)
    expected = [block.queries[:, place] for block, place in zip(all_of_them, at, strict=True)]
    assert torch.equal(measured.queries, torch.stack(expected, 1))
    (alone,) = question_queries(index, questions[:1], last=True).blocks(0)
    assert torch.equal(alone.queries[:, 0], next(iter(all_of_them)).queries[:, -1])


def test_the_tails_second_half_attends_as_the_model_does(family_index: OpenIndex) -> None:
    outputs = attention_outputs(family_index.model, family_index.input_ids)
    half = family_index.split.tail - family_index.split.tail // 2
    for layer in family_index.artifact.manifest.indexed_layers:
        block = tail_block(family_index.artifact, layer)
        assert_close(outputs[layer][-half:], _attention(family_index, layer, block), 1e-4)
    assert len(MeasuredQueries(family_index.artifact)) == half


def test_without_questions_the_tail_is_measured_on(index: OpenIndex) -> None:
    blocks = question_queries(index, []).blocks(0)
    assert len(blocks) == 1
    assert torch.equal(blocks[0].queries, tail_block(index.artifact, 0).queries)
