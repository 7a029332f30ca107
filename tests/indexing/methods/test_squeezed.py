"""The squeezed indexer: its tensors, and thresholds that keep what they promise by a plain float64 lookup."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.random_tensors import clustered, normal
from support.reference import assert_close

from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import LayerFacts, Split
from sparsekv.indexing.indexers.interface import BuiltLayer, LayerInput, choose_indexers, indexers
from sparsekv.indexing.methods.squeezed import QUESTION_TOKENS, SqueezedIndexer

SPLIT = Split(sinks=3, middle=400, tail=64)
FACTS = LayerFacts(softmax_scale=0.3, softcap=None, sliding_window=None, attention_sinks=False)
INDEXER = SqueezedIndexer(levels=(0.1, 0.03))
DEEP = SqueezedIndexer(levels=(0.2, 0.08, 0.03))
ONE_BIN = 2.0**0.01
CAPPED = FACTS.model_copy(update={"softcap": 5.0})


def _input(seed: int, dtype: torch.dtype = torch.float32) -> LayerInput:
    """Keys that a random query attends to sharply in layer 0, and almost alike in layer 1."""
    keys = clustered(seed, 2, 400, 8, 20) * (1.0 if seed == 0 else 0.02)
    return LayerInput(keys.to(dtype), normal(seed, 2, 400, 8).to(dtype), FACTS, SPLIT)


def _layers(indexer: SqueezedIndexer, facts: LayerFacts = FACTS) -> list[BuiltLayer]:
    return [BuiltLayer(indexer.build_layer(_input(seed)), normal(9 + seed, 4, SPLIT.tail, 8), facts) for seed in (0, 1)]


def _scores(layer: BuiltLayer, level: int, queries: torch.Tensor, alive: torch.Tensor, pool: int) -> torch.Tensor:
    """S_i [Hk, Q / pool, C] in float64: over the clusters that are alive, averaged over the group and each pool."""
    centroids = layer.tensors[f"level{level}.centroids"].double()
    counts = layer.tensors[f"level{level}.counts"].double()
    grouped = queries.double().view(2, 2, -1, pool, 8)
    logits = layer.facts.softmax_scale * torch.einsum("hgqpd,hcd->hgqpc", grouped, centroids)
    if layer.facts.softcap is not None:
        logits = layer.facts.softcap * torch.tanh(logits / layer.facts.softcap)
    weights = logits.exp() * alive[:, None, :, None]
    return (weights / (counts[:, None, None, None] * weights).sum(-1, keepdim=True)).mean((1, 3))


def _kept_share(layers: list[BuiltLayer], half: slice, pool: int, thresholds: list[float]) -> float:
    """Mean share of tokens that thresholds, coarsest level first, keep: by the definition, cluster by cluster.

    A coarse level always opens its best cluster, as decoding does.
    """
    shares = []
    for layer in layers:
        queries, level = layer.tail_queries[:, half], len(thresholds) - 1
        pools = queries.shape[1] // pool
        alive = torch.ones(2, pools, layer.tensors[f"level{level}.counts"].shape[1], dtype=torch.float64)
        for threshold in thresholds:
            scores = _scores(layer, level, queries, alive, pool)
            above = (scores >= threshold) & (alive > 0)
            if level:
                above |= scores == scores.amax(-1, keepdim=True)
            kept = layer.tensors[f"level{level}.counts"][:, None] * above
            if level:
                parents = layer.tensors[f"level{level - 1}.parent"].long()[:, None].expand(-1, pools, -1)
                alive, level = above.gather(2, parents).double(), level - 1
        shares.append(kept.sum(-1).double() / SPLIT.middle)
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize("facts", [FACTS, CAPPED], ids=["plain", "soft-capped"])
@pytest.mark.parametrize(
    ("indexer", "lookup"),
    [(INDEXER, "flat"), (INDEXER, "hierarchical"), (DEEP, "hierarchical")],
    ids=["flat", "two levels", "three levels"],
)
@pytest.mark.parametrize(("kind", "pool"), [("decode", 1), ("prefill", QUESTION_TOKENS)])
def test_calibrated_threshold_keeps_its_share_of_the_calibration_half(
    indexer: SqueezedIndexer, facts: LayerFacts, lookup: str, kind: str, pool: int
) -> None:
    layers = _layers(indexer, facts)
    calibrated = indexer.calibrate(lambda: iter(layers))[kind][lookup]
    coarse, half = calibrated["coarse_thresholds"], slice(0, SPLIT.tail // 2)
    for kept, threshold in calibrated["curve"][80::8]:
        if threshold > 0:
            assert _kept_share(layers, half, pool, [*coarse, threshold * ONE_BIN**2]) < kept
            assert _kept_share(layers, half, pool, [*coarse, threshold * (1 - 1e-5)]) >= kept


@pytest.mark.parametrize(("kind", "pool"), [("decode", 1), ("prefill", QUESTION_TOKENS)])
def test_held_out_keep_rate_is_that_of_the_other_half(kind: str, pool: int) -> None:
    layers = _layers(INDEXER)
    calibrated = INDEXER.calibrate(lambda: iter(layers))[kind]["flat"]
    held_out, half = calibrated["held_out_keep"], slice(SPLIT.tail // 2, None)
    assert held_out["target"] == 0.05
    (above, high), (below, low) = calibrated["curve"][93:95]
    assert above < 0.05 < below
    assert _kept_share(layers, half, pool, [high * ONE_BIN]) <= held_out["kept"] + 1e-9
    assert held_out["kept"] <= _kept_share(layers, half, pool, [low / ONE_BIN]) + 1e-9


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_each_coarse_threshold_leaves_half_of_the_tokens(kind: str) -> None:
    layers = _layers(DEEP)
    calibrated = DEEP.calibrate(lambda: iter(layers))[kind]["hierarchical"]
    pool = 1 if kind == "decode" else QUESTION_TOKENS
    calibration_half = [replace(layer, tail_queries=layer.tail_queries[:, : SPLIT.tail // 2]) for layer in layers]
    coarsest = [
        BuiltLayer(
            {name.replace("level2", "level0"): tensor for name, tensor in layer.tensors.items() if "level2" in name},
            layer.tail_queries,
            layer.facts,
        )
        for layer in calibration_half
    ]
    assert len(calibrated["coarse_thresholds"]) == 2
    assert _kept_share(coarsest, slice(None), pool, calibrated["coarse_thresholds"][:1]) == pytest.approx(0.5, abs=0.06)


def test_a_queries_pool_is_never_larger_than_half_of_a_short_tail() -> None:
    layers = [replace(layer, tail_queries=layer.tail_queries[:, :3]) for layer in _layers(INDEXER)]
    calibrated = INDEXER.calibrate(lambda: iter(layers))
    assert calibrated["prefill"]["flat"]["curve"] == calibrated["decode"]["flat"]["curve"]


def test_one_level_has_no_hierarchical_calibration() -> None:
    indexer = SqueezedIndexer(levels=(0.1,))
    calibrated = indexer.calibrate(lambda: iter(_layers(indexer)))
    assert [list(kind) for kind in calibrated.values()] == [["flat"], ["flat"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_have_the_sizes_that_the_levels_ask_for(dtype: torch.dtype) -> None:
    built = INDEXER.build_layer(_input(0, dtype))
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in built.items()}
    assert shapes == {
        "token_order": ((2, 400), torch.int32),
        "token_offsets": ((2, 41), torch.int32),
        "level0.centroids": ((2, 40, 8), dtype),
        "level0.value_centroids": ((2, 40, 8), dtype),
        "level0.counts": ((2, 40), torch.int32),
        "level0.parent": ((2, 40), torch.int32),
        "level1.centroids": ((2, 12, 8), dtype),
        "level1.value_centroids": ((2, 12, 8), dtype),
        "level1.counts": ((2, 12), torch.int32),
    }


def test_positions_are_those_of_the_prompt_and_centroids_the_means_there() -> None:
    layer = _input(2)
    built = INDEXER.build_layer(layer)
    assert built["token_order"].min() == SPLIT.sinks
    assert built["token_order"].max() == SPLIT.sinks + SPLIT.middle - 1
    for head in range(2):
        start, end = built["token_offsets"][head, 5:7].tolist()
        members = layer.keys[head, built["token_order"][head, start:end].long() - SPLIT.sinks]
        assert_close(built["level0.centroids"][head, 5], members.double().mean(0), 1e-5)


def test_seed_space_and_iterations_each_change_the_clusters() -> None:
    layer = _input(3)
    orders = [
        INDEXER.build_layer(layer)["token_order"],
        *(
            replace(INDEXER, **{name: value}).build_layer(layer)["token_order"]
            for name, value in (("seed", 1), ("space", "raw"), ("iterations", 1))
        ),
    ]
    assert all(not torch.equal(orders[0], other) for other in orders[1:])
    assert torch.equal(orders[0], INDEXER.build_layer(layer)["token_order"])


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"levels": ()}, "--levels"),
        ({"levels": (0.01, 0.05)}, "--levels"),
        ({"levels": (0.05, 0.05)}, "--levels"),
        ({"levels": (1.5, 0.5)}, "--levels"),
        ({"levels": (0.1, 0.0)}, "--levels"),
        ({"iterations": 0}, "--iterations 0"),
        ({"space": "cosine"}, "--space cosine"),
    ],
    ids=lambda value: str(value),
)
def test_parameters_that_make_no_sense_are_refused_by_name(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SqueezedIndexer(**parameters)


def test_methods_are_chosen_by_name_in_order_once_and_by_default_but_for_some() -> None:
    assert indexers()["squeezed"] is SqueezedIndexer
    assert choose_indexers(["all"]) == choose_indexers(["squeezed", "all"]) == list(indexers())
    assert choose_indexers([]) == [name for name in indexers() if indexers()[name].by_default]
    assert "squeezed" not in choose_indexers([])
    assert choose_indexers(["squeezed", "squeezed"]) == ["squeezed"]
    with pytest.raises(UsageError, match=r"no index is built for 'squeesed' .*; these have one: .*squeezed"):
        choose_indexers(["squeesed"])


def test_calibration_walks_the_layers_as_often_as_it_needs() -> None:
    layers, walks = _layers(INDEXER), 0

    def walk() -> Iterator[BuiltLayer]:
        nonlocal walks
        walks += 1
        return iter(layers)

    assert INDEXER.calibrate(walk) == INDEXER.calibrate(lambda: iter(layers))
    assert walks > 1
