"""H2O keeps the tokens of highest accumulated attention, the same ones for every step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.choices import assert_best, recorded_choices
from support.configs import sparse
from support.random_tensors import normal
from support.small_index import build_small, random_ids, stepped_logits
from support.small_layer import all_chosen, as_queries, small_layer

from sparsekv.indexing.methods.h2o import H2OIndexer
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.methods.h2o import H2O
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import Budget


@pytest.fixture(scope="module")
def h2o_index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    return build_small(tmp_path_factory.mktemp("h2o") / "small.skv", methods={"h2o": H2OIndexer(query_sample=60)})


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), middle=st.integers(5, 90), budget=st.integers(1, 100), shared=st.booleans())
def test_the_tokens_of_highest_score_are_kept(seed: int, middle: int, budget: int, shared: bool) -> None:
    layer, scores = small_layer(seed, middle=middle), normal(seed + 9, 2, middle)
    selector = H2O().prepare(replace(layer.context, tensors={"scores": scores}))
    selection = selector.select(as_queries(layer.queries, joint=shared), Budget(budget))
    queries = 1 if shared else layer.queries.shape[2]
    wanted = scores.double()[:, None].expand(-1, queries, -1)
    assert_best(all_chosen(selection, selector), wanted, min(budget, middle))
    assert selection.cost.index_rows == 0


def test_a_whole_answer_attends_to_the_stored_scores_best(h2o_index: OpenIndex) -> None:
    cache = h2o_index.cache(sparse("h2o", H2O(), Budget(20)))
    with recorded_choices(cache) as layers:
        stepped_logits(h2o_index, cache, random_ids(12), question=9)
    for layer, choices in enumerate(layers):
        scores = h2o_index.artifact.method_tensors("h2o", layer)["scores"].double()
        assert [choice.queries.joint for choice in choices] == [True, False, False, False]
        for choice in choices:
            assert_best(choice.tokens, scores[:, None], 20)


def test_a_report_tells_recall_on_the_queries_that_were_summed(h2o_index: OpenIndex) -> None:
    report = recall_report(h2o_index.artifact, ["h2o"], [Budget(0.1)], MeasuredQueries(h2o_index.artifact))
    assert all(row.recall_seen is not None and 0 < row.recall_seen <= 1 for row in report.rows)
    (mean,) = report.by()
    assert mean.kv_fraction == pytest.approx(Budget(0.1).share(h2o_index.split.middle))
