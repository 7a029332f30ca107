"""Tests of a report's measures, against the definitions written out in float64, token by token."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.reference import attention_probabilities, reference_attention
from support.small_index import build_small
from support.small_layer import as_queries, chosen_tokens

from sparsekv.formats.index.reader import CPU, Artifact
from sparsekv.indexing.methods.codes import CodesIndexer
from sparsekv.indexing.methods.h2o import H2OIndexer
from sparsekv.indexing.methods.pqcache import PQCacheIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.attention.guard import Attempt
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.h2o import H2O
from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.methods.loki import Loki
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.methods.pqcache import PQCache
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.snapkv import SnapKV
from sparsekv.runtime.methods.sparq import SparQ
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.methods.window import Window
from sparsekv.runtime.reporting.recall import (
    MeasuredSetting,
    Measures,
    measure_layer,
    step_measures,
    tail_block,
    truths,
)
from sparsekv.runtime.selection.interface import Budget, Method, MethodSpec, Selection, Selector

NAMES = ("selected_tokens", "recall", "attention_mass", "output_error", "kv_fraction", "missed_mass")
METHODS: dict[str, tuple[str, Method]] = {
    "flat": ("squeezed", Squeezed()),
    "hierarchical": ("squeezed", Squeezed("hierarchical")),
    "threshold": ("squeezed", Squeezed("flat", "threshold")),
    "quest": ("quest", Quest()),
    "oracle": ("oracle", Oracle()),
    "window": ("window", Window()),
    "snapkv": ("snapkv", SnapKV()),
    "h2o": ("h2o", H2O()),
    "keydiff": ("keydiff", KeyDiff()),
    "pqcache": ("pqcache", PQCache()),
    "pqcache reranked": ("pqcache", PQCache(rerank=1.5)),
    "codes": ("codes", Codes(replace=False)),
    "sparq": ("sparq", SparQ(channels=5)),
    "loki": ("loki", Loki(dims=5)),
}
_Choice = tuple[Selector, Selection, torch.Tensor]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt-oss"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Plain attention, soft-capped logits, and learned sink logits, in turn."""
    methods = {
        "squeezed": SqueezedIndexer(levels=(0.2, 0.06)),
        "h2o": H2OIndexer(),
        "pqcache": PQCacheIndexer(pq_bytes=4),
        "codes": CodesIndexer(levels=(0.1,), code_bytes=4, iterations=3, query_sample=64),
    }
    index = build_small(tmp_path_factory.mktemp(request.param) / "small.skv", request.param, methods=methods)
    return index.artifact


@dataclass(frozen=True)
class _Tail:
    """Dense attention of one layer's measured queries in float64, straight from the index's files.

    queries [Hk, G, Q, D]; keys, values [Hk, N, D]; causal [Q, N] bool; probability [Hk, G, Q, N]; output [Hk, G, Q, D].
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    causal: torch.Tensor
    probability: torch.Tensor
    output: torch.Tensor


def _options(artifact: Artifact, layer: int) -> dict[str, Any]:
    facts, sinks = artifact.manifest.layers[layer], artifact.queries(layer).get("sink_logits")
    Hk = artifact.context(layer)[0].shape[0]
    return {
        "softmax_scale": facts.softmax_scale,
        "softcap": facts.softcap,
        "sink_logits": None if sinks is None else sinks.view(Hk, -1),
    }


def _tail(artifact: Artifact, layer: int) -> _Tail:
    split, (keys, values) = artifact.manifest.split, artifact.context(layer)
    first = split.tokens - split.tail + split.tail // 2
    queries = artifact.queries(layer)["tail"][:, split.tail // 2 :].unflatten(0, (keys.shape[0], -1))
    causal = torch.arange(split.tokens) <= torch.arange(first, split.tokens)[:, None]
    options = _options(artifact, layer)
    return _Tail(
        queries,
        keys,
        values,
        causal,
        attention_probabilities(queries, keys, mask=causal, **options),
        reference_attention(queries, keys, values, mask=causal, **options),
    )


def _selector_and_choice(artifact: Artifact, layer: int, tail: _Tail, method: str, budget: Budget) -> _Choice:
    name, parameters = METHODS[method]
    split = artifact.manifest.split
    selector = prepare_layer(LayerRows(artifact, layer), MethodSpec(name, "", parameters)).selector
    # All that is attended anyway, by what is left of the probability: log(p / q) + log-sum-exp of the middle.
    middle = slice(split.sinks, split.sinks + split.middle)
    options = _options(artifact, layer)
    logits = torch.einsum("hgqd,hmd->hgqm", tail.queries.double(), tail.keys[:, middle].double())
    logits = logits * options["softmax_scale"]
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    inside = tail.probability[..., middle].sum(-1)
    exact = logits.logsumexp(-1) + ((1 - inside) / inside).log()
    selection = selector.select(as_queries(tail.queries, exact.float(), first=split.tokens - split.tail // 2), budget)
    rows = torch.as_tensor(selection.cost.index_rows, dtype=torch.float64).expand(selection.rows.starts.shape[:2])
    return selector, selection, rows


def _by_definition(
    artifact: Artifact, layer: int, method: str, budget: Budget, reference: Budget | None = None
) -> dict[str, torch.Tensor]:
    """Means over queries [Hk] of each measure, one head and query after the other."""
    tail, split = _tail(artifact, layer), artifact.manifest.split
    selector, selection, index_rows = _selector_and_choice(artifact, layer, tail, method, budget)
    heads, queries = tail.queries.shape[0], tail.queries.shape[2]
    wanted, middle = (reference or budget).tokens(split.middle), range(split.sinks, split.sinks + split.middle)
    measures = {name: torch.zeros(heads, queries, dtype=torch.float64) for name in NAMES}
    mask = tail.causal.repeat(heads, 1, 1)
    for head in range(heads):
        for query in range(queries):
            probability = tail.probability[head, :, query].mean(0)
            chosen = {split.sinks + token for token in chosen_tokens(selection, selector, head, query)}
            oracle = set(sorted(middle, key=lambda token: -float(probability[token]))[:wanted])
            mask[head, query, [token for token in middle if token not in chosen]] = False
            mass = sum(float(probability[token]) for token in chosen)
            measures["selected_tokens"][head, query] = len(chosen)
            measures["recall"][head, query] = len(chosen & oracle) / wanted
            inside = sum(float(probability[token]) for token in middle)
            measures["attention_mass"][head, query] = mass / inside
            measures["missed_mass"][head, query] = inside - mass
            read = 2 * len(chosen) + float(index_rows[head, query])
            measures["kv_fraction"][head, query] = read / (2 * split.middle)
    sparse = reference_attention(tail.queries, tail.keys, tail.values, mask=mask[:, None], **_options(artifact, layer))
    measures["output_error"] = ((sparse - tail.output).norm(dim=-1) / tail.output.norm(dim=-1)).mean(1)
    return {name: values.mean(1) for name, values in measures.items()}


def _measured(artifact: Artifact, layer: int, method: str, budget: Budget) -> dict[str, torch.Tensor]:
    name, parameters = METHODS[method]
    one = MeasuredSetting(MethodSpec(name, method, parameters), budget)
    return measure_layer(LayerRows(artifact, layer), [one], iter([tail_block(artifact, layer)]))[one].means()


@pytest.mark.thinned
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [Budget(0.05), Budget(40), Budget(1.0)], ids=str)
def test_measures_are_those_of_the_definitions(artifact: Artifact, method: str, budget: Budget) -> None:
    layer = artifact.manifest.indexed_layers[-1]
    expected = _by_definition(artifact, layer, method, budget)
    measured = _measured(artifact, layer, method, budget)
    for name in NAMES:
        assert measured[name].tolist() == pytest.approx(expected[name].tolist(), abs=2e-5), name


@pytest.mark.parametrize("method", ["hierarchical", "quest", "snapkv", "window"])
@pytest.mark.parametrize("budget", [Budget(0.05), Budget(90)], ids=str)
def test_recall_can_be_of_a_fixed_number_of_tokens(artifact: Artifact, method: str, budget: Budget) -> None:
    """Whatever the budget is; what needs no output is measured without."""
    layer, reference = artifact.manifest.indexed_layers[-1], Budget(0.15)
    expected = _by_definition(artifact, layer, method, budget, reference)
    name, parameters = METHODS[method]
    one = MeasuredSetting(MethodSpec(name, method, parameters), budget, reference=reference, outputs=False)
    measured = measure_layer(LayerRows(artifact, layer), [one], [tail_block(artifact, layer)])[one].means()
    for measure in ("selected_tokens", "recall", "attention_mass", "kv_fraction", "missed_mass"):
        assert measured[measure].tolist() == pytest.approx(expected[measure].tolist(), abs=2e-5), measure
    assert bool(measured["output_error"].isnan().all())


@given(st.integers(1, 280), st.integers(1, 280))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_choice_recalls_more_than_it_has_tokens(artifact: Artifact, tokens: int, reference: int) -> None:
    layer, middle = artifact.manifest.indexed_layers[0], artifact.manifest.split.middle
    wanted = [
        MeasuredSetting(
            MethodSpec(name, name, METHODS[name][1]), Budget(tokens), reference=Budget(reference), outputs=False
        )
        for name in ("oracle", "quest")
    ]
    oracle, quest = measure_layer(LayerRows(artifact, layer), wanted, [tail_block(artifact, layer)]).values()
    most = min(1.0, min(tokens, middle) / min(reference, middle))
    assert oracle.means()["recall"].tolist() == pytest.approx([most] * len(oracle.means()["recall"]))
    # A query's recall is a float32: 9 of 277 is rounded up by more than 1e-9.
    assert bool((quest.means()["recall"] <= most * (1 + 1e-6)).all())


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"window"}))
def test_everything_chosen_leaves_no_error(artifact: Artifact, method: str) -> None:
    for layer in artifact.manifest.indexed_layers:
        measured = _measured(artifact, layer, method, Budget(1.0))
        assert float(measured["output_error"].max()) < 1e-5
        for name in ("recall", "attention_mass"):
            assert measured[name].tolist() == pytest.approx([1.0] * len(measured[name]))
        assert measured["selected_tokens"].tolist() == [artifact.manifest.split.middle] * len(measured["recall"])


@pytest.mark.parametrize("budget", [Budget(0.05), Budget(0.3)], ids=str)
def test_the_oracle_recalls_itself_and_keeps_the_most(artifact: Artifact, budget: Budget) -> None:
    for layer in artifact.manifest.indexed_layers:
        oracle = _measured(artifact, layer, "oracle", budget)
        assert oracle["recall"].tolist() == [1.0] * len(oracle["recall"])
        for method in METHODS.keys() - {"threshold"}:
            other = _measured(artifact, layer, method, budget)
            assert bool((other["attention_mass"] <= oracle["attention_mass"] + 1e-6).all())
            assert bool((other["selected_tokens"] <= oracle["selected_tokens"]).all())


def test_the_window_recalls_nothing_and_reads_nothing(artifact: Artifact) -> None:
    measured = _measured(artifact, artifact.manifest.indexed_layers[0], "window", Budget(0.05))
    for name in ("selected_tokens", "recall", "attention_mass", "kv_fraction"):
        assert not measured[name].any()
    assert bool((measured["output_error"] > 0.01).all())


def test_tokens_without_any_probability_count_alike(artifact: Artifact) -> None:
    """A query's exact rows may have all attention in float32. Its attention mass is then the share of chosen tokens."""
    layer = artifact.manifest.indexed_layers[0]
    (truth,) = truths(LayerRows(artifact, layer), [tail_block(artifact, layer)], CPU)
    faint = replace(truth, probability=torch.zeros_like(truth.probability))
    chosen = torch.zeros_like(truth.probability, dtype=torch.bool)
    chosen[..., : chosen.shape[-1] // 4] = True
    attempt = Attempt(faint.probability.sum(-1), faint.probability.sum(-1), (chosen, truth.output.transpose(1, 2)))
    mass = step_measures(attempt, faint, 5)["attention_mass"]
    assert mass.flatten().tolist() == pytest.approx([float(chosen.float().mean())] * mass.numel())


def test_queries_measured_in_pieces_give_the_same_means(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = artifact.manifest.indexed_layers[0]
    whole = _measured(artifact, layer, "flat", Budget(0.1))
    monkeypatch.setattr("sparsekv.runtime.reporting.recall.LOGITS_AT_ONCE", 3 * 4 * artifact.manifest.split.tokens)
    pieces = _measured(artifact, layer, "flat", Budget(0.1))
    for name, values in whole.items():
        assert pieces[name].tolist() == pytest.approx(values.tolist(), abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("together", [1, 3, 4, 7, 64])
def test_no_group_of_queries_together_is_smaller_than_asked(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    block = tail_block(artifact, layer := artifact.manifest.indexed_layers[0])
    monkeypatch.setattr("sparsekv.runtime.reporting.recall.LOGITS_AT_ONCE", 5 * 4 * artifact.manifest.split.tokens)
    batches = list(truths(LayerRows(artifact, layer), [block], torch.device("cpu"), together))
    sizes = [one.queries.query.shape[2] for one in batches]
    asked = torch.cat([one.queries.query for one in batches], 2).flatten(0, 1)
    assert torch.equal(asked, block.queries)
    assert min(sizes) >= min(together, block.queries.shape[1])
    assert all(size % together == 0 for size in sizes[:-1])
    assert max(sizes) < max(5, together) + together


def test_means_are_over_all_queries_that_were_added() -> None:
    measures = Measures()
    measures.add(recall=torch.tensor([[1.0, 0.0], [0.5, 0.5]]), output_error=torch.zeros(2, 2))
    measures.add(recall=torch.tensor([[1.0], [0.2]]), output_error=torch.ones(2, 1))
    assert measures.means()["recall"].tolist() == pytest.approx([2 / 3, 0.4])
    assert measures.means()["output_error"].tolist() == pytest.approx([1 / 3, 1 / 3])
