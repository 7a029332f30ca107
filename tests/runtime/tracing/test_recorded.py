"""Tests of a step's record: it holds the tokens that the step attended to, for every method, and adds up."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from support.reference import assert_close, attention_probabilities
from support.small_layer import all_chosen
from support.traced import DENSE, SOME, Answered, answered, chosen_tokens, every_form

from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.reporting.recall import MeasuredSetting, SharedStates, measure_layer
from sparsekv.runtime.selection.interface import Budget, MethodSpec
from sparsekv.runtime.tracing.recorder import MEASURES, last_query, own_shares
from sparsekv.runtime.tracing.trace import TracedIndex

SHARES = ("exact", "chosen", "stood_for", "missed")
QUESTION = "What comes next?"


def test_the_chosen_tokens_are_those_that_the_method_chooses(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    """A second selector is asked the same, step by step."""
    middle = full_index.split.middle
    for form in forms:
        steps, shared = answer_of(form).steps, dict[str, object]()
        selectors = {}
        for layer in steps:
            rows = LayerRows(full_index.artifact, layer)
            prepared = prepare_layer(rows, form, shared=shared)
            selectors[layer] = prepared.selector
        for number, of_layers in enumerate(zip(*steps.values(), strict=True)):
            for selector, one in zip(selectors.values(), of_layers, strict=True):
                selection = selector.select(one.step.queries, SOME)
                if number == 0:
                    continue  # of the question, which may have a budget of its own, and which some methods observe
                found = chosen_tokens(own_shares(one, middle)) > 0
                for of_head, (chosen,) in zip(found, all_chosen(selection, selector), strict=True):
                    weighed = set(of_head.nonzero()[:, 0].tolist())
                    # A sample's weights may be nothing to all query heads.
                    assert weighed == set(chosen) or (selection.rows.log_weights is not None and weighed < set(chosen))


def test_shares_add_up_to_all_attention(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    for form in forms:
        for steps in answer_of(form).steps.values():
            for one in steps:
                shares = own_shares(one, full_index.split.middle)
                assert_close(shares.totals().sum(0), torch.ones(len(shares.exact)), 1e-5)
                assert float(torch.cat([shares.chosen, shares.others.sum(0)], 1).min()) >= 0
                assert float(shares.nowhere.sum()) == 0


def test_every_token_that_is_not_chosen_is_represented_once(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    """A centroid counts as many tokens as are said to be represented by it, and gives each the same."""
    middle = full_index.split.middle
    for form in forms:
        for one in (one for steps in answer_of(form).steps.values() for one in steps):
            if not one.fetched.rest_attended or form.name == "sparq":
                continue
            report = one.selector.report
            assert report is not None
            assert report.centroid_of is not None
            shares, numbers = own_shares(one, middle), report.centroid_of(one.fetched.rest)
            left = torch.ones_like(shares.others[0])
            for head, (chosen,) in enumerate(all_chosen(one.selection, one.selector)):
                left[head, chosen] = 0
            counts = torch.cat([part.log_counts[:, -1] for part in one.fetched.rest], 1).exp()
            if form.name == "codes":
                counts = (counts.log() - one.selector.bias).exp()  # type: ignore[attr-defined]
            represented = torch.zeros_like(counts).scatter_add_(1, numbers, left)
            assert_close(represented, counts, 1e-5)
            assert bool((shares.others[0][left == 0] == 0).all())
            given = torch.zeros_like(counts).scatter_add_(1, numbers, shares.others[0])
            rows, exact = one.fetched.keys.shape[1], one.step.exact.keys.shape[1]
            assert_close(given, one.weights[:, :, -1, rows + exact :].mean(1), 1e-5)


def test_everything_chosen_leaves_nothing(full_index: OpenIndex, forms: list[MethodSpec]) -> None:
    """Samples and methods with a choice of another size are what they are at any budget."""
    form = forms[0]
    if form.name in ("window", "magicpig", "sampleattention"):
        return
    question = question_ids(full_index, QUESTION)
    _, trace = TracedIndex(full_index, DecodeConfig(form, Budget(1.0))).trace(question, 2, truth=True)
    for one in trace["records"]:
        assert (one["stood_for"], one["missed"]) == (0, 0)
        assert one["exact"] + one["chosen"] == pytest.approx(1)
        assert one["missed_tokens"] == []
    assert trace["measures"]["recall"] == 1


def test_a_dense_question_is_recorded_by_the_tokens_that_it_attends_to(
    full_index: OpenIndex, forms: list[MethodSpec]
) -> None:
    """Whatever order the rows have that it reads."""
    sinks, middle = full_index.split.sinks, full_index.split.middle
    for form in forms:
        for layer, (first, *_) in answered(full_index, form, prefill=DENSE).steps.items():
            keys, _ = LayerRows(full_index.artifact, layer).part(slice(sinks, sinks + middle), torch.device("cpu"))
            step = first.step
            logits = attention_logits(step.query[:, :, -1:], torch.cat([keys, step.keys], 1), *step.how[:2])
            expected = logits.double().softmax(-1)[:, :, 0, :middle].mean(1)
            assert_close(chosen_tokens(own_shares(first, middle)), expected, 1e-5)


def test_the_answer_and_its_cost_are_those_of_generate(
    full_index: OpenIndex, forms: list[MethodSpec], every: bool
) -> None:
    question = question_ids(full_index, QUESTION)
    for form in forms if every else forms[-1:]:
        setting = DecodeConfig(form, SOME)
        plain = Session.open(full_index, setting).ask(question, Sampling(3))
        answer, trace = TracedIndex(full_index, setting).trace(question, 3)
        assert answer.ids == plain.ids
        assert trace["measures"]["kv_fraction"] == pytest.approx(plain.kv_fraction, rel=1e-6)


def test_measures_are_a_reports_of_the_same_queries_to_the_last_digit(
    full_index: OpenIndex, forms: list[MethodSpec], answer_of: Callable[[MethodSpec], Answered]
) -> None:
    question = question_ids(full_index, QUESTION)
    for form in forms:
        steps = answer_of(form).steps
        if steps[0][0].selector.conversation is not None:
            continue  # a report's selector has observed no question
        _, trace = TracedIndex(full_index, DecodeConfig(form, SOME)).trace(question, 2, truth=True)
        states: SharedStates = {}
        expected = {}
        for layer, (_, one, *_) in steps.items():
            rows, measured = LayerRows(full_index.artifact, layer), MeasuredSetting(form, SOME)
            found = measure_layer(rows, [measured], [last_query(one.step, rows)], states)[measured].means()
            expected[layer] = {name: found[name].tolist() for name in MEASURES}
        for row in trace["by_head_measures"]:
            of_layer = expected[row["layer"]]
            assert {name: row[name] for name in MEASURES} == {name: of_layer[name][row["kv_head"]] for name in MEASURES}


def test_dense_weights_are_split_by_what_the_step_gave(full_index: OpenIndex) -> None:
    """By the definition in float64: chosen, else the smaller of the dense weight and the step's, else missed."""
    form, split = every_form(full_index)["multipole flat"], full_index.split
    middle, question = slice(split.sinks, split.sinks + split.middle), question_ids(full_index, QUESTION)
    _, trace = TracedIndex(full_index, DecodeConfig(form, SOME)).trace(question, 3, truth=True)
    records = iter(trace["records"])
    of_layers = answered(full_index, form).steps
    for steps in zip(*of_layers.values(), strict=True):
        for layer, one in zip(of_layers, steps, strict=True):
            keys = full_index.artifact.context(layer)[0]
            stored = split.sinks + split.tail
            everything = torch.cat([keys, one.step.keys[:, stored:]], 1)
            dense = attention_probabilities(one.step.query[:, :, -1:], everything, one.step.how[0])[:, :, 0].mean(1)
            own = own_shares(one, split.middle)
            for head, of_head in enumerate(dense[:, middle]):
                record, chosen = next(records), chosen_tokens(own)[head] > 0
                stood_for = torch.minimum(of_head, own.others[0, head].double()).masked_fill(chosen, 0)
                missed = (of_head - stood_for).masked_fill(chosen, 0)
                wanted = (1 - of_head.sum(), of_head[chosen].sum(), stood_for.sum(), missed.sum())
                assert [record[share] for share in SHARES] == pytest.approx([float(one) for one in wanted], abs=1e-6)
                places = [place - split.sinks for place, _ in record["missed_tokens"]]
                assert [weight for _, weight in record["missed_tokens"]] == pytest.approx(
                    missed[places].tolist(), rel=1e-3
                )
                assert float(missed.max()) == pytest.approx(max([0.0, *missed[places].tolist()]), abs=1e-4)


def test_means_are_those_of_the_records(full_index: OpenIndex) -> None:
    """The prompt has so few passages that every list is whole but for what is below its least share."""
    setting, question = DecodeConfig(every_form(full_index)["codes"], SOME), question_ids(full_index, QUESTION)
    _, trace = TracedIndex(full_index, setting).trace(question, 3, truth=True)
    assert len(trace["passages"]) <= 16
    groups = {
        "by_token": lambda one: one["token"],
        "by_head": lambda one: (one["layer"], one["kv_head"]),
    }
    for name, key in groups.items():
        keys = list(dict.fromkeys(map(key, trace["records"])))
        assert len(keys) == len(trace[name])
        for group, mean in zip(keys, trace[name], strict=True):
            members = [one for one in trace["records"] if key(one) == group]
            for share in SHARES:
                assert mean[share] == pytest.approx(sum(one[share] for one in members) / len(members), abs=1e-6)
            of_passage = torch.zeros(len(trace["passages"]), 3)
            for one in members:
                for passage, *shares in one["passages"]:
                    of_passage[passage] += torch.tensor(shares) / len(members)
            for passage, *shares in mean["passages"]:
                assert shares == pytest.approx(of_passage[passage].tolist(), abs=2e-4)


def test_lists_have_the_largest_first_and_lie_in_the_middle(full_index: OpenIndex) -> None:
    setting, question = DecodeConfig(every_form(full_index)["codes"], SOME), question_ids(full_index, QUESTION)
    answer, trace = TracedIndex(full_index, setting).trace(question, 3)
    assert len(trace["answer_tokens"]) == len(answer.ids)
    assert len(trace["records"]) == len(answer.ids) * len(trace["layers"]) * trace["kv_heads"]
    inside = range(trace["n_sinks"], trace["n_sinks"] + trace["n_middle"])
    for one in trace["records"]:
        assert one["missed"] is None
        assert one["missed_tokens"] == []
        for tokens in (one["chosen_tokens"], one["passages"]):
            sums = [sum(shares) for _, *shares in tokens]
            assert all(before >= after - 1e-3 * before for before, after in pairwise(sums))
        assert all(place in inside for place, _ in one["chosen_tokens"])
        assert sum(sum(shares) for _, *shares in one["passages"]) <= one["chosen"] + one["stood_for"] + 1e-3


def test_every_family_is_traced_in_the_layers_that_select(family_index: OpenIndex) -> None:
    """With soft caps, learned sinks and sliding layers, beside the plain answer."""
    setting, question = (
        DecodeConfig(every_form(family_index)["squeezed flat"], SOME),
        question_ids(family_index, QUESTION),
    )
    plain = Session.open(family_index, setting).ask(question, Sampling(3))
    answer, trace = TracedIndex(family_index, setting).trace(question, 3, truth=True)
    assert answer.ids == plain.ids
    assert trace["layers"] == family_index.artifact.manifest.indexed_layers
    for one in trace["records"]:
        assert sum(one[share] for share in SHARES) == pytest.approx(1)
        assert min(one[share] for share in SHARES) > -1e-6
