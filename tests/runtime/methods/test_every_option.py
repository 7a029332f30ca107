"""Every option of a method, and of its index, changes something; where it cannot, its field's metadata says so."""

from dataclasses import asdict, fields
from functools import cache
from typing import Any

import pytest
import torch
from support.random_tensors import clustered, normal
from support.small_layer import SINKS, TAIL, as_queries

from sparsekv.formats.index.schema import LayerFacts, RopeFacts, Split
from sparsekv.indexing.indexers.interface import BuiltLayer, Indexer, LayerInput, indexers
from sparsekv.runtime.selection.interface import Budget, LayerPosition, MiddleContext, methods

Hk, G, D, MIDDLE, LAYERS, QUESTION = 2, 3, 32, 500, 6, 24
INSIDE = slice(SINKS, SINKS + MIDDLE)
SPLIT = Split(sinks=SINKS, middle=MIDDLE, tail=TAIL)
ROPE = RopeFacts(frequencies=[10_000.0 ** (-pair / (D // 2)) for pair in range(D // 2)], interleaved=False)
FACTS = LayerFacts(softmax_scale=0.3, softcap=None, sliding_window=None, attention_sinks=False, rope=ROPE)
OTHER: dict[str, Any] = {
    **{"seed": 1, "iterations": 1, "space": "centred", "outliers": 0.05, "block": 100, "levels": (0.2,)},
    **{"code_bytes": 4, "pq_bytes": 4, "query_sample": 64, "alpha": 0.5, "centroids": 16},
    **{"subspace_size": 8, "subspaces": "contiguous"},
    **{"rerank": 4.0, "scan": 0.3, "replace": False, "lookup": "hierarchical", "opened": 1.0, "rope_distance": 10},
    **{"selection": "threshold", "csattention_scoring": "paper", "csattention_weights": "fitted", "backoff": 0.5},
    **{"select_layer": 4, "recent_share": 0.7, "dims": 4, "hash_bits": 5, "hash_tables": 20, "hash_seed": 1},
    **{"page_size": 4, "prefill_queries": 2, "quoka_subset": "all", "quoka_similarity": "dot", "quoka_across": "mean"},
    **{"window_queries": 4, "pool_size": 1, "pooling": "average", "channels": 4, "mean_value": True},
}
"""For each option a value that is not its default."""
OF_STEPS = {"step", "stream", "buffer"}
"""Options that change later steps only."""
UNREAD = {("h2o", "seed")}
"""Options of an index in which nothing is random, although every indexer has a seed."""
TWO_LEVELS = ("multipole", "multipole-windowed")


@cache
def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [Hk, N, D], and queries [Hk, G, TAIL, D] that attend to few tokens."""
    keys, values = clustered(1, Hk, SPLIT.tokens, D, 40), normal(2, Hk, SPLIT.tokens, D)
    return keys, values, 3 * normal(3, Hk, G, TAIL, D)


@cache
def _built(indexer: Indexer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of an indexer, and its calibration."""
    keys, values, queries = _rows()
    wanted = min(MIDDLE, -(-indexer.queries_wanted() // G))
    places = torch.linspace(0, MIDDLE - 1, wanted).round().long()
    sample = (2 * normal(7, Hk * G, MIDDLE, D))[:, places]
    layer = LayerInput(
        keys[:, INSIDE], values[:, INSIDE], FACTS, SPLIT, sample, places + SINKS, sink_keys=keys[:, :SINKS]
    )
    tensors = indexer.build_layer(layer)
    return tensors, indexer.calibrate(lambda: iter([BuiltLayer(tensors, queries.flatten(0, 1), FACTS)]))


def _selected(name: str, options: dict[str, Any], *, joint: bool) -> list[torch.Tensor]:
    """All that a method selects in each layer: rows, weights of samples, and log-counts of centroids."""
    keys, values, queries = _rows()
    kind, found, shared = methods()[name], list[torch.Tensor](), dict[str, Any]()
    levels: dict[str, Any] = {"levels": (0.1, 0.03)} if name in TWO_LEVELS else {}
    made = indexers()[name](**levels) if kind.needs_index else None
    tensors, calibration = ({}, {}) if made is None else _built(made)
    if "token_order" in tensors:
        tensors = tensors | {"token_order": tensors["token_order"] - SINKS}
    query = queries[:, :, : QUESTION if joint else 1]
    for number in range(LAYERS if "select_layer" in kind.__dataclass_fields__ else 1):
        context = MiddleContext(
            lambda: keys[:, INSIDE],
            lambda: values[:, INSIDE],
            lambda: queries[:, :, TAIL // 2 :],
            FACTS,
            tensors,
            calibration,
            first_token=SINKS,
            parameters={} if made is None else asdict(made),
            position=LayerPosition(number, LAYERS, shared),
        )
        selector = kind(**options).prepare(context)
        asked = as_queries(query, torch.zeros(query.shape[:3]), joint=joint, first=SPLIT.tokens)
        chosen = selector.select(asked, Budget(0.05))
        rows, valid = chosen.rows.expand()
        layout = torch.arange(MIDDLE).expand(Hk, -1) if selector.layout is None else selector.layout
        rows = layout[:, None].expand(-1, rows.shape[1], -1).gather(-1, rows.clamp(max=MIDDLE - 1))
        found.append((rows if valid is None else rows.masked_fill(~valid, -1)).sort(-1).values)
        found += [] if chosen.rows.log_weights is None else [chosen.rows.log_weights]
        found += [part.log_counts for part in chosen.attended_segments()]
    return found


def _alike(found: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(found) == len(other) and all(map(torch.equal, found, other))


@pytest.mark.parametrize("name", methods())
def test_each_option_of_a_method_changes_a_selection_of_the_kind_that_its_metadata_says(name: str) -> None:
    known = {field.name: field for field in fields(methods()[name])}
    for option in known.keys() - OF_STEPS:
        needs, joint = known[option].metadata.get("needs", {}), known[option].metadata.get("joint", False)
        needed = {other: value if isinstance(value, tuple) else (value,) for other, value in needs.items()}
        usual = {other: values[0] for other, values in needed.items() if other in known}
        met = all(known[other].default in needed[other] for other in usual)
        for asks in (False, True):
            before, after = (_selected(name, usual | more, joint=asks) for more in ({}, {option: OTHER[option]}))
            assert _alike(before, after) == (joint and not asks), option
            if not met:
                assert _alike(_selected(name, {}, joint=asks), _selected(name, {option: OTHER[option]}, joint=asks))


@pytest.mark.parametrize("name", indexers())
def test_each_option_of_an_index_changes_its_tensors(name: str) -> None:
    kind = indexers()[name]
    before, _ = _built(kind())
    for field in fields(kind):
        after, _ = _built(kind(**{field.name: OTHER[field.name]}))
        same = before.keys() == after.keys() and _alike([*before.values()], [after[key] for key in before])
        assert same == ((name, field.name) in UNREAD), field.name
