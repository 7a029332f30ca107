"""Decoding and reporting over real indices with centroids in the place of tokens, against the definition in float64."""

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.replaced import EXACT, replaced_attention, represented
from support.replaced_decoding import decoding_errors, middle_rows
from support.small_index import build_small, plain_logits, random_ids, stepped_logits
from support.small_layer import as_queries
from support.tiny_models import FAMILIES_OF_STEPS

from sparsekv.indexing.methods.multipole import MultipoleIndexer, WindowedMultipoleIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer, stored_context
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.reporting.recall import MeasuredSetting, measure_layer, tail_block
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec

METHODS: dict[str, tuple[Method, str]] = {
    "multipole": (Multipole(), "multipole"),
    "multipole-windowed": (WindowedMultipole(), "multipole-windowed"),
    "squeezed": (Squeezed(), "squeezed"),
    "quest": (Quest(), "squeezed"),
}
"""Each method, and whose clusters stand for what it leaves: for one without any, the fewest there are."""
INDEXERS = {
    "multipole": MultipoleIndexer(levels=(0.25,), block=80),
    "multipole-windowed": WindowedMultipoleIndexer(levels=(0.25,), block=80),
    "squeezed": SqueezedIndexer(levels=(0.2,)),
}
READ = {"multipole-windowed": 3}  # of each cluster; of those of the others 2
every_method = pytest.mark.parametrize("name", METHODS)
FEW = Budget(0.05)


@pytest.fixture(scope="module", params=FAMILIES_OF_STEPS)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index of each family in turn, in blocks of 80 tokens."""
    return build_small(tmp_path_factory.mktemp(request.param) / "small.skv", request.param, methods=INDEXERS)


@pytest.mark.thinned
@every_method
def test_a_model_decodes_with_the_output_that_the_definition_gives(index: OpenIndex, name: str) -> None:
    errors = decoding_errors(index, name, *METHODS[name], FEW)
    assert len(errors) == 4 * len(index.artifact.manifest.indexed_layers)
    assert max(errors) <= 1e-5


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """An index in float32 with its model in bfloat16."""
    index = build_small(tmp_path_factory.mktemp("half") / "small.skv", methods=INDEXERS)
    index.model.bfloat16()
    return index


@every_method
def test_an_index_in_float32_serves_a_model_in_bfloat16(half: OpenIndex, name: str) -> None:
    """Rows are rounded as the model's are, centroids stay as they were stored."""
    assert max(decoding_errors(half, name, *METHODS[name], FEW)) <= 1e-2


@every_method
def test_everything_chosen_leaves_nothing_to_stand_for(index: OpenIndex, name: str) -> None:
    cache, tokens = index.cache(sparse(name, METHODS[name][0], Budget(1.0), residual=True)), random_ids(15)
    plain = plain_logits(index.model, torch.cat([index.input_ids, tokens]))[len(index.input_ids) :]
    assert_close(stepped_logits(index, cache, tokens, question=9), plain, 1e-4)


@every_method
def test_a_report_measures_the_output_that_the_definition_gives(index: OpenIndex, name: str) -> None:
    artifact, (method, clusters) = index.artifact, METHODS[name]
    split, number = artifact.manifest.split, artifact.manifest.indexed_layers[-1]
    facts, stored = artifact.manifest.layers[number], artifact.queries(number)
    exact = [torch.cat([rows[:, : split.sinks], rows[:, -split.tail :]], 1) for rows in artifact.context(number)]
    query = stored["tail"][:, split.tail // 2 :].unflatten(0, (len(exact[0]), -1))
    sinks = stored["sink_logits"].view(query.shape[:2]) if "sink_logits" in stored else None
    selector = prepare_layer(LayerRows(artifact, number), MethodSpec(name, "", method, residual=True)).selector
    selection = selector.select(as_queries(query, first=split.tokens - query.shape[2]), FEW)
    stands = represented(selection, selector, 0, split.middle)
    tensors = stored_context(LayerRows(artifact, number), clusters).tensors
    sparse, dense = (
        replaced_attention(query, middle_rows(artifact, number), (exact[0], exact[1]), level, tensors, facts, sinks)
        for level in (stands, torch.full_like(stands, EXACT))
    )
    expected = ((sparse - dense).norm(dim=-1) / dense.norm(dim=-1)).mean((1, 2))
    one = MeasuredSetting(MethodSpec(name, "", method, residual=True), FEW)
    measured = measure_layer(LayerRows(artifact, number), [one], [tail_block(artifact, number)])[one].means()
    assert measured["output_error"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    rows_of_index = READ.get(name, 2) * tensors["level0.counts"].shape[1]
    rows_of_index += 2 * -(-split.middle // 16) if name == "quest" else 0
    fraction = (2 * FEW.tokens(split.middle) + rows_of_index) / (2 * split.middle)
    assert measured["kv_fraction"].tolist() == pytest.approx([fraction] * len(exact[0]))
