"""The recall report: every method, variant and budget, layer by layer, and averages over any of them."""

from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import pytest
from support.small_index import INDEXERS, build_small

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import CPU
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.reporting.recall import MeasuredQueries, MeasuredSetting, measure_layer, tail_block
from sparsekv.runtime.reporting.report import MEASURES, RecallReport, recall_report
from sparsekv.runtime.selection.interface import Budget, MethodSpec, methods
from sparsekv.runtime.selection.registry import choose_methods

BUDGETS = [Budget(0.05), Budget(60), Budget(1.0)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """Gemma 2: two of its four layers slide and are not in a report."""
    return build_small(tmp_path_factory.mktemp("report") / "small.skv", "gemma2")


@pytest.fixture(scope="module")
def report(index: OpenIndex) -> RecallReport:
    return recall_report(index.artifact, choose_methods([], ["squeezed"]), BUDGETS, MeasuredQueries(index.artifact))


def test_there_is_one_row_for_each_choice_layer_and_head(report: RecallReport, index: OpenIndex) -> None:
    variants = {
        (name, form) for name, method in methods().items() if not method.needs_index for form in method.variants(None)
    }
    variants |= {("squeezed", form) for form in ("flat", "hierarchical", "flat threshold", "hierarchical threshold")}
    keys = [(row.method, row.variant, row.budget, row.layer, row.kv_head) for row in report.rows]
    expected = {
        (*variant, budget.value, layer, head)
        for variant in variants
        for budget in BUDGETS
        for layer in index.artifact.manifest.indexed_layers
        for head in range(2)
    }
    assert set(keys) == expected
    assert len(keys) == len(expected)


def test_header_describes_what_was_measured(report: RecallReport, index: OpenIndex) -> None:
    split = index.split
    header = {name: value for name, value in asdict(report).items() if name != "rows"}
    assert header == {
        "index": str(index.artifact.folder),
        "model": "tiny-gemma2",
        "n_context": split.tokens,
        "n_middle": split.middle,
        "n_queries": split.tail // 2,
        "prefill": "dense",
        "kv_storage": None,
    }
    assert {row.budget_tokens for row in report.rows} == {round(0.05 * split.middle), 60, split.middle}


def test_a_question_of_one_token_selects_for_itself(tmp_path: Path) -> None:
    """A search schedule reuses selections within a question only."""
    artifact = build_small(tmp_path / "a.skv", methods={"csattention": INDEXERS["csattention"]}).artifact
    layer = artifact.manifest.indexed_layers[0]
    asked = [tail_block(artifact, layer).part(slice(one, one + 1), CPU) for one in range(3)]
    found = []
    for step in (1, 4):
        setting = MeasuredSetting(MethodSpec("csattention", "", CSAttention(step=step)), Budget(0.1))
        found.append(measure_layer(LayerRows(artifact, layer), [setting], asked)[setting].means()["recall"].tolist())
    assert found[0] == found[1]


def test_no_batch_divides_queries_that_share_a_selection(
    full_index: OpenIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on logits is that of a document so long that few queries are measured at once."""
    artifact = full_index.artifact
    layer = artifact.manifest.indexed_layers[0]
    rows, block, oracle = LayerRows(artifact, layer), tail_block(artifact, layer), MethodSpec("oracle", "", Oracle())
    searching = MeasuredSetting(MethodSpec("csattention", "", CSAttention(step=4)), Budget(0.1))
    measured = [searching, *(MeasuredSetting(oracle, Budget(0.1), together=number) for number in (2, 3))]
    whole = {one: measure_layer(rows, [one], [block])[one].means() for one in measured}
    monkeypatch.setattr("sparsekv.runtime.reporting.recall.LOGITS_AT_ONCE", 3 * 4 * artifact.manifest.split.tokens)
    for one, found in measure_layer(rows, measured, [block]).items():
        for name in ("selected_tokens", "recall", "kv_fraction"):
            assert found.means()[name].tolist() == pytest.approx(whole[one][name].tolist()), (one.form.name, name)


@pytest.mark.parametrize("names", [(), ("layer",), ("kv_head",), ("layer", "kv_head")], ids=str)
def test_averages_are_over_all_that_is_not_named(report: RecallReport, names: tuple[str, ...]) -> None:
    for row in report.by(*names):
        members = [
            one
            for one in report.rows
            if (one.method, one.variant, one.budget) == (row.method, row.variant, row.budget)
            and all(getattr(one, name) == getattr(row, name) for name in names)
        ]
        assert len(members) == 4 / 2 ** len(names)
        assert all(getattr(row, name) is None for name in {"layer", "kv_head"} - set(names))
        for name in MEASURES:
            values = [getattr(one, name) for one in members]
            assert getattr(row, name) == (None if None in values else pytest.approx(fmean(values)))
            assert values.count(None) in (0, len(values))
    forms = {(row.method, row.variant) for row in report.rows}
    assert len(report.by(*names)) == len(forms) * 3 * 2 ** len(names)


def test_no_method_of_a_report_beats_the_oracle(report: RecallReport) -> None:
    best = {(row.budget, row.layer, row.kv_head): row for row in report.rows if row.method == "oracle"}
    for row in report.rows:
        oracle = best[row.budget, row.layer, row.kv_head]
        assert oracle.recall == 1
        if row.selected_tokens <= oracle.selected_tokens and "threshold" not in row.variant:
            assert row.attention_mass <= oracle.attention_mass + 1e-6


@pytest.mark.parametrize("limit", [0.05, 0.2, 1.0])
def test_the_lowest_error_is_among_what_reads_little_and_is_no_bound(report: RecallReport, limit: float) -> None:
    best = report.best_within(limit)
    assert best is not None
    assert round(best.kv_fraction, 3) <= limit
    assert best.layer is None
    assert best.method != "oracle"
    for row in report.by():
        assert row.method == "oracle" or round(row.kv_fraction, 3) > limit or row.output_error >= best.output_error


def test_a_limit_is_compared_with_the_fractions_that_a_table_shows(report: RecallReport) -> None:
    """A row that a table shows with 0.120 is within a limit of 0.12."""
    below = [row for row in report.by() if row.method != "oracle" and round(row.kv_fraction, 3) < row.kv_fraction]
    assert below
    for row in below:
        assert row in report.ranked_within(round(row.kv_fraction, 3))


def test_nothing_is_best_where_all_read_more(report: RecallReport) -> None:
    assert report.best_within(-0.1) is None


def test_progress_counts_indexed_layers(index: OpenIndex) -> None:
    seen: list[tuple[int, int]] = []
    recall_report(index.artifact, ["window"], BUDGETS, MeasuredQueries(index.artifact), lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)]


def test_methods_are_chosen_by_name_once_and_need_their_index() -> None:
    free = [name for name, method in methods().items() if not method.needs_index]
    assert {"oracle", "quest", "window"} <= set(free)
    assert choose_methods([], ["squeezed"]) == choose_methods(["all"], ["squeezed"]) == sorted([*free, "squeezed"])
    assert choose_methods([], []) == free
    assert choose_methods(["quest", "oracle", "quest"], []) == ["quest", "oracle"]
    with pytest.raises(UsageError, match=r"no method 'quast' \(did you mean quest\?\); there are: .*quest"):
        choose_methods(["quast"], [])
    with pytest.raises(UsageError, match="not built with 'squeezed'; build squeezed too, or choose one of: "):
        choose_methods(["squeezed"], [])
