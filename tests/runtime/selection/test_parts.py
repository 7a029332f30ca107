"""The parts of selectors, each there or None: which selector has which, and what wrappers and copies have."""

from copy import copy

import pytest
import torch
from support.random_tensors import normal
from support.small_index import INDEXERS, build_small
from support.small_layer import all_chosen, as_queries
from support.traced import every_form

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer, residual_source
from sparsekv.runtime.methods.csattention import CSAttention
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, Selector, methods
from sparsekv.runtime.selection.wrappers import ResidualSelector, residual_clusters, unite

NAMES = ("kernels", "conversation", "append", "report")
CLUSTERS = {"kernels", "report"}
PARTS = {
    "codes": CLUSTERS,
    "multipole": CLUSTERS,
    "multipole-windowed": CLUSTERS,
    "squeezed": CLUSTERS,
    "csattention": {"report"},
    "snapkv": {"conversation"},
    "sparq mean value": {"report"},
}
"""By method, or method and variant; all others have none."""
STATEFUL = {
    "csattention that reuses": CSAttention(step=3),
    "csattention that appends": CSAttention(stream=True),
    "multipole that appends": Multipole(stream=True),
}
FEW = Budget(0.1)


@pytest.fixture(scope="module")
def full_index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """With every method that has an index."""
    return build_small(tmp_path_factory.mktemp("full") / "full.skv", methods=INDEXERS)


def _selectors(index: OpenIndex) -> dict[str, Selector]:
    """Return the selectors of every method in every variant, and of the methods that keep a state."""
    found = {form.title: form for form in every_form(index).values() if not form.residual}
    found |= {name: MethodSpec(name.split()[0], "", method) for name, method in STATEFUL.items()}
    return {title: prepare_layer(LayerRows(index.artifact, 0), form).selector for title, form in found.items()}


def _with_residual(index: OpenIndex, selector: Selector) -> ResidualSelector:
    tensors = dict(index.artifact.method_tensors(residual_source(index.artifact), 0))
    tensors["token_order"] = tensors["token_order"] - index.split.sinks
    return ResidualSelector(selector, residual_clusters(tensors))


def _parts(selector: Selector) -> set[str]:
    return {name for name in NAMES if getattr(selector, name) is not None}


def test_each_selector_has_the_parts_that_its_method_needs(full_index: OpenIndex) -> None:
    selectors = _selectors(full_index)
    assert {title.split()[0] for title in selectors} == set(methods())
    wanted = {title: PARTS.get(title, PARTS.get(title.split()[0], set())) for title in selectors}
    wanted["csattention that reuses"] = {"conversation", "report"}
    wanted["csattention that appends"] = {"append", "report"}
    wanted["multipole that appends"] = CLUSTERS | {"append"}
    assert {title: _parts(selector) for title, selector in selectors.items()} == wanted


def test_a_residual_has_what_its_inner_selector_has(full_index: OpenIndex) -> None:
    """All but kernels and appending, which know nothing of the residual's clusters."""
    for title, inner in _selectors(full_index).items():
        outer = _with_residual(full_index, inner)
        assert outer.conversation == inner.conversation, title
        assert outer.graph_state() == inner.graph_state(), title
        assert outer.question_piece == inner.question_piece, title
        assert (outer.kernels, outer.append) == (None, None), title
        assert outer.report.covered == (inner.report and inner.report.covered), title
        assert outer.report.centroid_of is not None


@pytest.mark.parametrize("name", ["csattention that appends", "multipole that appends"])
def test_a_residual_of_what_appends_is_refused_where_its_own_centroids_do_not_serve(
    full_index: OpenIndex, name: str
) -> None:
    method, rows = STATEFUL[name], LayerRows(full_index.artifact, 0)
    if name.startswith("csattention"):
        with pytest.raises(UsageError, match="--residual: with --stream, csattention adds generated tokens"):
            prepare_layer(rows, MethodSpec("csattention", "", method, residual=True))
    else:
        assert not isinstance(
            prepare_layer(rows, MethodSpec("multipole", "", method, residual=True)).selector, ResidualSelector
        )


@pytest.mark.parametrize("residual", [False, True])
def test_a_copy_observes_a_question_of_its_own(full_index: OpenIndex, residual: bool) -> None:
    """As many sequences do that are decoded together; the selector that was copied chooses as before."""
    selector: Selector = prepare_layer(LayerRows(full_index.artifact, 0), MethodSpec("snapkv", "", SnapKV())).selector
    if residual:
        selector = _with_residual(full_index, selector)
    queries = normal(0, 2, 2, 6, 16)
    one, question = as_queries(queries[:, :, :1]), as_queries(queries, joint=True)
    before, other = all_chosen(selector.select(one, FEW), selector), copy(selector)
    assert other.conversation is not None
    assert other.conversation.observe is not None
    other.conversation.observe(question)
    observed = all_chosen(other.select(one, FEW), other)
    assert all_chosen(selector.select(one, FEW), selector) == before != observed
    assert selector.conversation is not None
    selector.conversation.forget()
    assert all_chosen(other.select(one, FEW), other) == observed
    other.conversation.forget()
    assert all_chosen(other.select(one, FEW), other) == before


def test_queries_of_methods_that_can_unite_have_centroids_for_what_none_chooses(full_index: OpenIndex) -> None:
    queries, middle = as_queries(normal(1, 2, 2, 3, 16)), full_index.split.middle
    for form in every_form(full_index).values():
        selector = prepare_layer(LayerRows(full_index.artifact, 0), form).selector
        selection = selector.select(queries, FEW)
        if form.method.can_unite():
            together = unite(selection, selector, middle)
            attended = selection.rest is not None and selection.rest.attended
            assert (together.rest is not None and together.rest.attended) == attended, form.title
        else:
            assert form.method.replaces(), form.title
            with pytest.raises(NotImplementedError):
                selector.rest_of(torch.zeros(2, middle, dtype=torch.bool))


class _Plain(Method):
    """A package's method that says nothing of its facts."""

    def prepare(self, context: object) -> Selector:
        raise NotImplementedError


def test_facts_of_a_method_that_says_nothing_are_those_of_most() -> None:
    plain = _Plain()
    assert (plain.merges_heads, plain.cycle(), plain.replaces(), plain.can_unite()) == (False, 1, False, True)
    assert {name for name, method in methods().items() if method.merges_heads} == {"lessismore"}
    assert CSAttention(step=3).cycle() == 3
