"""Answers without some passages: which tokens these are, and what attention without them is."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.small_index import TEXT, build_small, plain_logits_after, small_plan, with_changes
from support.tiny_models import tiny_tokenizer
from support.tokenizers_of_families import KINDS, tokenizer_of
from support.traced import SOME, Answered, chosen_tokens, every_form
from tokenizers import normalizers

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import Border
from sparsekv.formats.models.load import identify
from sparsekv.indexing.build import build_index
from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.runtime.attention.config import DecodeConfig, Dense, QuestionPrefill
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.kv_store import MappedRows
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.selection.interface import Budget, MethodSpec
from sparsekv.runtime.sources.places import token_texts
from sparsekv.runtime.tracing.recorder import AttendedStep, own_shares
from sparsekv.runtime.tracing.trace import (
    EVERYTHING,
    MOST_FOUND,
    HidingExecutor,
    TracedIndex,
    log_probability,
    tokens_of,
)

TEXTS = ["The", " cat", " sat", ".\n", "A", " dog", "", "", "\U0001f511", " ran", ".", " The", " cat", " ran"]


def _found(*passages: str) -> list[int]:
    return tokens_of(passages, TEXTS).nonzero()[:, 0].tolist()


def test_a_passage_is_found_wherever_it_is_with_any_white_space() -> None:
    assert _found("The cat") == [0, 1, 11, 12]
    assert _found("sat.  A") == [2, 3, 4]
    assert _found("sat. A", "ran.") == [2, 3, 4, 9, 10]


def test_a_token_is_found_by_a_part_of_it_and_a_character_with_all_its_tokens() -> None:
    assert _found("at sat") == [1, 2]
    assert _found("\U0001f511") == [6, 7, 8]


@pytest.mark.parametrize(
    ("passage", "message"),
    [
        ("The bird", "has no such passage"),
        (" \n", "--without is empty"),
    ],
)
def test_what_is_no_passage_is_refused(passage: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tokens_of([passage], TEXTS)


def test_a_passage_in_many_places_is_refused() -> None:
    assert int(tokens_of(["a"], [" a"] * MOST_FOUND).sum()) == MOST_FOUND
    with pytest.raises(UsageError, match=f"more than {MOST_FOUND} places; give more of the passage"):
        tokens_of(["a"], [" a"] * (MOST_FOUND + 1))


def _steps(found: Answered) -> Iterator[tuple[SparseLayer, AttendedStep]]:
    """The question's and the first token's, of each layer."""
    for layer, steps in found.steps.items():
        kept = found.cache.stored_layers[layer]
        assert isinstance(kept, SparseLayer)
        yield from [(kept, one) for one in steps[:2]]


def _hidden(index: OpenIndex) -> torch.Tensor:
    """Some tokens of sinks, middle and tail, in runs and alone."""
    hidden = torch.rand(index.split.tokens, generator=torch.Generator().manual_seed(1)) < 0.3
    hidden[100:150] = True
    return hidden


def _executor(layer: SparseLayer, hidden: torch.Tensor, sinks: int) -> HidingExecutor:
    plan = layer.plan
    return HidingExecutor(plan.selector, plan.middle, torch.device("cpu"), hidden=hidden, sinks=sinks)


def test_nothing_hidden_changes_nothing(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    nothing = torch.zeros(full_index.split.tokens, dtype=torch.bool)
    for layer, one in chain.from_iterable(_steps(answer_of(form)) for form in forms):
        executor = _executor(layer, nothing, full_index.split.sinks)
        output = executor.attend_to(one.step, one.selection, one.selector).output
        expected = layer.plan.gather.attend_to(one.step, one.selection, one.selector).output
        assert_close(output, expected, 1e-6)


def test_hidden_tokens_get_no_weight_and_centroids_count_fewer(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    """One softmax in float64 over all that is shown; of centroids, the share of their tokens that is."""
    split, hidden = full_index.split, _hidden(full_index)
    middle = slice(split.sinks, split.sinks + split.middle)
    beside = torch.cat([hidden[: split.sinks], hidden[middle.stop :]])
    for layer, one in chain.from_iterable(_steps(answer_of(form)) for form in forms):
        executor = _executor(layer, hidden, split.sinks)
        output = executor.attend_to(one.step, one.selection, one.selector).output
        assert_close(output, _expected(one, hidden[middle], beside), 1e-5)


def test_a_dense_question_attends_to_all_that_is_shown(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    """Whatever order the rows have that it reads."""
    split, hidden, artifact = full_index.split, _hidden(full_index), full_index.artifact
    middle = slice(split.sinks, split.sinks + split.middle)
    beside = torch.cat([hidden[: split.sinks], hidden[middle.stop :]])
    for layer, steps in answer_of(forms[0]).steps.items():
        step, stored = steps[0].step, artifact.context_rows(layer)
        rows = MappedRows(stored, middle, steps[0].layout, torch.float32)
        executor = HidingExecutor(steps[0].selector, rows, torch.device("cpu"), hidden=hidden, sinks=split.sinks)
        shown = torch.ones(step.query.shape[2], step.keys.shape[1], dtype=torch.bool)
        shown = shown if step.mask is None else step.mask.clone()
        shown[:, : len(beside)] &= ~beside
        of_middle = Segment(*(one.double() for one in stored.part(middle)), ~hidden[middle])
        exact = Segment(step.keys.double(), step.values.double(), shown)
        expected = attend(step.query.double(), [of_middle, exact], *step.how)
        assert_close(executor.attend_to_everything(step), expected, 1e-5)


def _expected(one: AttendedStep, hidden: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """Rows of hidden tokens get a bias of minus infinity; a centroid of n tokens, of which h are hidden,
    log((n - h) / n)."""
    fetched, step, Hk = one.fetched, one.step, len(one.step.query)
    rows, _ = one.selection.rows.expand()
    layout = torch.arange(len(hidden)).expand(Hk, -1) if one.layout is None else one.layout
    positions = layout.gather(1, rows[:, 0])
    seen = torch.ones(step.query.shape[2], step.keys.shape[1], dtype=torch.bool)
    seen = seen if step.mask is None else step.mask.clone()
    seen[:, : len(beside)] &= ~beside
    keys, values = [fetched.keys, step.keys], [fetched.values, step.values]
    biases = [torch.where(hidden[positions], -torch.inf, 0.0)[:, None, None], torch.where(seen, 0.0, -torch.inf)]
    if fetched.valid is not None:
        biases[0] = biases[0].masked_fill(~fetched.valid[:, None], -torch.inf)
    if fetched.log_weights is not None:
        biases[0] = biases[0] + fetched.log_weights
    if fetched.rest_attended:
        report = one.selector.report
        assert report is not None
        assert report.centroid_of is not None
        numbers = report.centroid_of(fetched.rest)
        chosen = chosen_tokens(own_shares(one, len(hidden))) > 0
        start = 0
        for part in fetched.rest:
            keys, values, end = [*keys, part.keys], [*values, part.values], start + part.keys.shape[1]
            members = (numbers[:, :, None] == torch.arange(start, end)) & ~chosen[:, :, None]
            shown = (members & ~hidden[:, None]).sum(1) / members.sum(1).clamp(min=1)
            biases.append(part.log_counts[:, None] + shown.log()[:, None, None])
            start = end
    bias = torch.cat([bias.expand(*step.query.shape[:3], -1) for bias in biases], -1)
    logits = torch.einsum("hgqd,htd->hgqt", step.query.double(), torch.cat(keys, 1).double()) * step.how[0]
    return torch.einsum("hgqt,htd->hgqd", (logits + bias).softmax(-1), torch.cat(values, 1).double())


def test_the_log_probability_is_the_plain_models(full_index: OpenIndex) -> None:
    """With everything attended, summed over the answer's tokens, each after those before it."""
    question, answer = torch.tensor([70, 80, 90, 100]), [101, 5, 66]
    cache = Session.open(full_index, DecodeConfig(EVERYTHING)).cache
    logits = plain_logits_after(full_index, torch.cat([question, torch.tensor(answer)]))
    expected = logits.double().log_softmax(-1)[3:-1].gather(1, torch.tensor(answer)[:, None]).sum()
    for at_once in (False, True):
        found = log_probability(full_index, cache, question, answer, at_once=at_once)
        assert found == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_of_one_token_to_a_question_of_one_is_worth_what_the_plain_model_gives(
    full_index: OpenIndex, at_once: bool
) -> None:
    """At any budget: nothing is decoded."""
    question, prefill = torch.tensor([70]), Dense()
    cache = full_index.cache(sparse("codes", Codes(), Budget(0.05), question=prefill))
    expected = plain_logits_after(full_index, question).double().log_softmax(-1)[0, 101]
    found = log_probability(full_index, cache, question, [101], at_once=at_once)
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_dense_log_probabilities_are_the_plain_models_whatever_the_question_attended_to(full_index: OpenIndex) -> None:
    """Dense attention has a dense question, too, as in an answer."""
    question, nothing = question_ids(full_index, "What comes next?"), torch.zeros(full_index.split.tokens).bool()
    sparsely = QuestionPrefill("oracle", Oracle(), Budget(0.05))
    setting, densely = sparse("codes", Codes(), SOME, question=sparsely), DecodeConfig(Dense(), question=sparsely)
    first = Session.open(full_index, setting).ask(question, Sampling(4))
    logits = plain_logits_after(full_index, torch.cat([question, torch.tensor(first.ids)]))
    steps = logits.double().log_softmax(-1)[len(question) - 1 : -1]
    found = TracedIndex(full_index, setting).without(nothing, question, 4, first, truth=True)
    expected = float(steps.gather(1, torch.tensor(first.ids)[:, None]).sum())
    assert found["dense_log_probability"][0] == pytest.approx(expected, rel=1e-4)
    found = TracedIndex(full_index, densely).without(nothing, question, 4, first)
    assert found["log_probability"][0] == pytest.approx(expected, rel=1e-4)


def test_without_a_passage_the_first_answer_is_worth_less_or_more(full_index: OpenIndex) -> None:
    """By the setting and by dense attention; with nothing hidden it is worth what it was."""
    traced = TracedIndex(full_index, DecodeConfig(every_form(full_index)["codes"], SOME))
    question = question_ids(full_index, "What comes next?")
    first, _ = traced.trace(question, 4)
    nothing = torch.zeros(full_index.split.tokens, dtype=torch.bool)
    same = traced.without(nothing, question, 4, first, truth=True)
    assert same["answer"] == first.text
    for name in ("log_probability", "dense_log_probability"):
        with_all, without = same[name]
        assert with_all == without
    less = traced.without(_hidden(full_index), question, 4, first)
    assert less["log_probability"][0] == same["log_probability"][0]
    assert less["log_probability"][1] != less["log_probability"][0]
    assert "dense_log_probability" not in less


def test_a_passage_is_found_as_the_tokenizer_normalises_it(tmp_path: Path) -> None:
    """Copied from a document whose letters and accents are apart, and up to the end that questions begin with."""
    text = "Le cafe\u0301 est ferme\u0301. " + TEXT[:500] + "La fin."
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    plan = small_plan()
    loaded = replace(plan.loaded, tokenizer=tokenizer)
    build_index(with_changes(plan, loaded=loaded, prompt=encode_prompt(tokenizer, text)), tmp_path / "nfc.skv")
    opened = open_index(Artifact(tmp_path / "nfc.skv"), loaded.model, tokenizer, identify(loaded))
    traced = TracedIndex(opened, DecodeConfig(EVERYTHING))
    hidden = traced.hide(["cafe\u0301 est ferme\u0301"])
    assert tokenizer.decode(opened.input_ids[hidden]) == "caf\u00e9 est ferm\u00e9"
    assert torch.equal(traced.hide(["caf\u00e9 est ferm\u00e9"]), hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_a_passage_is_not_searched_in_the_template_before_the_document(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = encode_prompt(tokenizer, "A document with words such as user, INST, USER and im_start. " * 2)
    assert prompt.chat is not None
    texts = token_texts(tokenizer, prompt.input_ids.tolist())
    for word in ("user", "INST", "USER", "im_start"):
        found = tokens_of([word], texts, before=prompt.chat.before)
        shown = "".join(text for text, hidden in zip(texts, found.tolist(), strict=True) if not hidden)
        assert "".join(shown.split()).startswith("".join(prompt.chat.before.split()))
        assert found.any()


def test_a_passage_may_end_where_the_tokens_of_questions_begin(tmp_path: Path) -> None:
    border = Border(lead="x", held=TEXT[300:303])
    opened = build_small(tmp_path / "held.skv", prompt=replace(small_plan().prompt, border=border))
    hidden = TracedIndex(opened, DecodeConfig(EVERYTHING)).hide([TEXT[270:303]])
    assert opened.tokenizer.decode(opened.input_ids[hidden]) == TEXT[270:300].lstrip()
