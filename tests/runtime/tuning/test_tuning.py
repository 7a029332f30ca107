"""The search for a setting: of budgets on known curves, and of settings on an index, against the recall report."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import sparse
from support.small_index import build_small, random_ids, stepped_logits

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.methods.multipole import MultipoleIndexer
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.window import Window, WindowSelector
from sparsekv.runtime.reporting.recall import MeasuredQueries, MeasuredSetting, measure_layer, tail_block
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget, MethodSpec, MiddleContext, methods
from sparsekv.runtime.tuning.coarse_search import LARGEST_BUDGET, SMALLEST_BUDGET, BudgetSearch, candidates, rounded
from sparsekv.runtime.tuning.goals import REFERENCE, AttentionMeter, ErrorGoal, RecallGoal, Tuned
from sparsekv.runtime.tuning.tuning import tune

NAMES = ["squeezed", "quest", "window"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A small index whose multipole has value centroids."""
    indexers = {"multipole": MultipoleIndexer(levels=(0.2,), block=64)}
    return build_small(tmp_path_factory.mktemp("tuning") / "small.skv", tail=32, methods=indexers).artifact


@given(
    bend=st.floats(0.2, 3.0),
    target=st.floats(0.02, 0.98),
    start=st.floats(SMALLEST_BUDGET, LARGEST_BUDGET),
    step=st.floats(1.1, 4.0),
    ratio=st.floats(1.02, 1.5),
)
@settings(max_examples=200)
def test_a_search_of_a_rising_curve_ends_at_the_smallest_share(
    bend: float, target: float, start: float, step: float, ratio: float
) -> None:
    search = BudgetSearch(target, start, step, ratio)
    while (share := search.propose()) is not None:
        assert share not in search.gains
        assert SMALLEST_BUDGET <= share <= LARGEST_BUDGET
        search.gains[share] = math.pow(share, bend)
    assert len(search.gains) < 40
    exact = math.pow(target, 1 / bend)
    if search.high is None:
        assert exact > LARGEST_BUDGET
        assert search.best == LARGEST_BUDGET
    else:
        assert search.best == search.high >= exact * (1 - 1e-9)
        assert search.high == SMALLEST_BUDGET or search.high <= exact * ratio * 1.011


def test_a_search_goes_on_from_what_is_known_when_its_target_rises() -> None:
    search = BudgetSearch(0.5, 0.3, 1.2, 1.05)
    for target in (0.5, 0.7):
        search.target = target
        while (share := search.propose()) is not None:
            search.gains[share] = share
        assert target <= search.best <= 1.06 * target


@given(
    bend=st.floats(0.2, 3.0),
    target=st.floats(0.02, 0.9),
    start=st.floats(SMALLEST_BUDGET, LARGEST_BUDGET),
    slack=st.floats(0.01, 0.1),
)
@settings(max_examples=100)
def test_a_search_with_slack_ends_at_what_gains_little_more_than_it_must(
    bend: float, target: float, start: float, slack: float
) -> None:
    search = BudgetSearch(target, start, 1.2, 1.05, slack)
    while (share := search.propose()) is not None:
        assert search.high is None or search.gains[search.high] > target + slack
        search.gains[share] = math.pow(share, bend)
    exact = math.pow(target, 1 / bend)
    assert search.high is not None or exact > LARGEST_BUDGET
    if search.high not in (None, SMALLEST_BUDGET):
        assert search.gains[search.high] <= target + slack or search.high <= exact * 1.05 * 1.011


@given(st.floats(SMALLEST_BUDGET, LARGEST_BUDGET))
def test_shares_are_rounded_up_to_three_digits(share: float) -> None:
    assert share * (1 - 1e-9) <= rounded(share) <= share * 1.01
    assert float(f"{rounded(share):.3g}") == rounded(share)


def _half(artifact: Artifact, one: Tuned, share: float, *, calibration: bool) -> tuple[float, float]:
    """Recall and KV fraction of a tuned form at one share, on one half of the tail, mean over layers and heads."""
    form = one.form
    measured = MeasuredSetting(form, Budget(share), reference=REFERENCE)
    means = [
        measure_layer(LayerRows(artifact, layer), [measured], [tail_block(artifact, layer, calibration=calibration)])[
            measured
        ].means()
        for layer in artifact.manifest.indexed_layers
    ]
    recall, kv = (fmean(float(of[name].mean()) for of in means) for name in ("recall", "kv_fraction"))
    return recall, kv


def test_what_is_found_is_what_a_report_says_and_nothing_much_cheaper_holds(index: OpenIndex) -> None:
    (best, *others), _ = tune(index.artifact, RecallGoal(0.7), NAMES)
    assert best.holds
    assert best.calibration >= 0.7
    assert best.held_out == best.recall >= 0.68
    assert best.layer_budgets is None
    rows = recall_report(index.artifact, [best.form.name], [Budget(best.budget)], MeasuredQueries(index.artifact)).by()
    reported = next(row for row in rows if row.variant == best.form.variant)
    assert (reported.output_error, reported.kv_fraction) == pytest.approx((best.error, best.kv_fraction))
    with torch.inference_mode():
        assert _half(index.artifact, best, best.budget, calibration=False)[0] == pytest.approx(best.recall)
        assert _half(index.artifact, best, best.budget, calibration=True)[0] == pytest.approx(best.calibration)
        assert _half(index.artifact, best, 0.9 * best.budget, calibration=True)[0] < best.aim
    assert all(one.kv_fraction >= best.kv_fraction for one in others if one.holds)


def test_a_method_that_chooses_nothing_holds_nothing(index: OpenIndex) -> None:
    ((window,), _) = tune(index.artifact, RecallGoal(0.5), ["window"])
    assert not window.holds
    assert (window.calibration, window.held_out, window.kv_fraction) == (0, 0, 0)


def test_a_default_of_a_number_of_tokens_is_told_as_a_share(artifact: Artifact) -> None:
    share = Budget(30).share(artifact.manifest.split.middle)
    quest = methods()["quest"]()
    told = [
        tune(artifact, RecallGoal(0.5), ["window"], present=sparse("quest", quest, budget))[1]
        for budget in (Budget(30), Budget(share))
    ]
    assert told[0] == told[1]
    assert told[0] is not None
    assert told[0].budget == share


def test_what_was_learned_from_the_calibration_queries_is_searched_again(index: OpenIndex) -> None:
    """SnapKV keeps what these very queries attend to, so on others it falls short."""
    goal = ErrorGoal(0.1)
    ((found,), _) = tune(index.artifact, goal, ["snapkv"])
    assert found.aim < goal.value
    assert found.calibration <= found.aim
    assert not found.holds or found.held_out <= goal.value + goal.tolerance


def test_every_method_that_can_run_is_searched_and_no_bound(artifact: Artifact) -> None:
    progress: list[tuple[int, int]] = []
    found, _ = tune(artifact, ErrorGoal(0.2), [], lambda stage, done, of: progress.append((done, of)))
    runs = {name for name, method in methods().items() if not method.needs_index} | {"multipole"}
    assert {one.form.name for one in found} == {name for name in runs if not methods()[name].is_bound}
    assert all(one.held_out <= 0.2 + 0.02 and one.kv_fraction < 1 for one in found if one.holds)
    assert [one.holds for one in found] == sorted((one.holds for one in found), reverse=True)
    assert {of for _, of in progress} == {len(artifact.manifest.indexed_layers)}


def test_candidates_have_a_residual_where_it_can_help(artifact: Artifact) -> None:
    def residual(*, wanted: bool) -> set[str]:
        return {form.name for form in candidates(artifact, ["all"], residual=wanted) if form.residual}

    assert {"quest", "window"} <= residual(wanted=True)
    assert "multipole" not in residual(wanted=True)
    assert residual(wanted=False) == set()
    with pytest.raises(UsageError, match="--method oracle: this is only an upper bound"):
        candidates(artifact, ["quest", "oracle"], residual=False)


def test_budgets_by_layer_read_less_and_are_what_a_report_says(tmp_path: Path) -> None:
    """The two layers of Gemma 2 that do not slide need budgets that are far apart."""
    artifact = build_small(tmp_path / "small.skv", "gemma2", tail=32).artifact
    goal = ErrorGoal(0.1)
    ((found,), _) = tune(artifact, goal, ["squeezed"])
    assert found.holds
    assert found.calibration <= 0.1
    shares = found.layer_budgets
    assert shares is not None
    assert list(shares) == artifact.manifest.indexed_layers
    assert found.budget == pytest.approx(fmean(shares.values()))
    budgets = [Budget(share) for share in shares.values()]
    report = recall_report(artifact, ["squeezed"], budgets, MeasuredQueries(artifact), residual=found.form.residual)
    of_form = [row for row in report.by("layer") if row.variant == found.form.variant]
    rows = [row for row in of_form if row.layer is not None and row.budget == shares[row.layer]]
    assert len(rows) == len(shares)
    told = [fmean(getattr(row, name) for row in rows) for name in ("output_error", "kv_fraction")]
    assert told == pytest.approx([found.error, found.kv_fraction])


@dataclass(frozen=True)
class _Chained(Window):
    """Chooses nothing, and leaves something for the layers after it."""

    def prepare(self, context: MiddleContext) -> WindowSelector:
        context.position.shared.setdefault("before", []).append(context.position.number)
        return super().prepare(context)


def test_layers_that_depend_on_one_another_are_never_measured_alone(index: OpenIndex) -> None:
    layers = index.artifact.manifest.indexed_layers
    chained, alone = MethodSpec("window", "chained", _Chained(), False), MethodSpec("window", "alone", Window(), False)
    meter, shares = AttentionMeter(index.artifact, REFERENCE, calibration=True), dict.fromkeys(layers, 0.5)
    with torch.inference_mode():
        meter.measure([(chained, shares), (alone, shares)], lambda done, of: None, layers[:1])
    assert meter.shared == {chained}
    assert meter.at(chained, 0.5, layers[0]).error == meter.at(alone, 0.5, layers[0]).error
    assert meter.at(chained, 0.5, layers[-1]).error > 0
    with pytest.raises(KeyError):
        meter.at(alone, 0.5, layers[-1])


def test_a_cache_takes_a_budget_for_each_layer(index: OpenIndex) -> None:
    oracle, layers = methods()["oracle"](), index.artifact.manifest.indexed_layers
    shares = {layer: Budget(0.1 + 0.2 * number) for number, layer in enumerate(layers[1:])}
    expected = [Budget(0.5).tokens(index.split.middle), *(one.tokens(index.split.middle) for one in shares.values())]
    cache = index.cache(sparse("oracle", oracle, Budget(0.5), layer_budgets=shares))
    stepped_logits(index, cache, random_ids(4), 1)
    assert cache.kv_fraction() == pytest.approx(fmean(expected) / index.split.middle)
