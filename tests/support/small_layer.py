"""One layer of random keys, values and queries with an index, ready to select from, without a model."""

from dataclasses import asdict, dataclass

import torch

from sparsekv.formats.index.schema import LayerFacts, RopeFacts, Split
from sparsekv.indexing.indexers.interface import BuiltLayer, LayerInput
from sparsekv.indexing.methods.multipole import MultipoleIndexer, WindowedMultipoleIndexer
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.attention.plan import LayerParts, plan_layer
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.kv_store import MemoryRows
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget, MiddleContext, Queries, Selection, Selector

from .configs import sparse
from .random_tensors import clustered, normal

SINKS, TAIL = 3, 32


@dataclass(frozen=True)
class SmallLayer:
    """Keys and values [Hk, N, D], queries [Hk, G, TAIL, D], and a method's input for the middle."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    split: Split
    context: MiddleContext

    @property
    def middle(self) -> slice:
        return slice(self.split.sinks, self.split.sinks + self.split.middle)


def small_layer(
    seed: int = 0,
    *,
    middle: int = 200,
    Hk: int = 2,
    G: int = 3,
    D: int = 16,
    levels: tuple[float, ...] = (0.1, 0.03),
    outliers: float = 0.0,
    softcap: float | None = None,
    repeated: int = 0,
    block: int | None = None,
    rope: RopeFacts | None = None,
) -> SmallLayer:
    """Return a layer with an index of squeezed or, with `block`, of multipole in blocks of this many tokens.

    With `rope`, multipole clusters keys with RoPE undone. The first `repeated` middle keys of head 0 are equal, and so
    are their values. Clusters of these keys have equal scores, so that any of them may be chosen.
    """
    split = Split(sinks=SINKS, middle=middle, tail=TAIL)
    keys = clustered(seed, Hk, split.tokens, D, 12)
    keys[0, SINKS : SINKS + repeated] = keys[0, SINKS]
    values, queries = normal(seed + 3, Hk, split.tokens, D), normal(seed + 4, Hk * G, TAIL, D)
    values[0, SINKS : SINKS + repeated] = values[0, SINKS]
    facts = LayerFacts(softmax_scale=0.2, softcap=softcap, sliding_window=None, attention_sinks=False, rope=rope)
    blocks = MultipoleIndexer if rope is None else WindowedMultipoleIndexer
    indexer = (
        SqueezedIndexer(levels=levels, outliers=outliers, iterations=5)
        if block is None
        else blocks(levels=levels, outliers=outliers, iterations=5, block=block)
    )
    inside = slice(SINKS, SINKS + middle)
    tensors = indexer.build_layer(LayerInput(keys[:, inside], values[:, inside], facts, split))
    calibration = indexer.calibrate(lambda: iter([BuiltLayer(tensors, queries, facts)]))
    tensors = tensors | {"token_order": tensors["token_order"] - SINKS}
    context = MiddleContext(
        lambda: keys[:, inside],
        lambda: values[:, inside],
        lambda: normal(seed + 5, Hk, G, TAIL // 2, D),
        facts,
        tensors,
        calibration,
        first_token=SINKS,
        parameters=asdict(indexer),
    )
    return SmallLayer(keys, values, queries.unflatten(0, (Hk, G)), split, context)


def sparse_layer(
    layer: SmallLayer,
    selector: Selector,
    budget: Budget,
    *,
    ahead: bool = False,
    gauge: bool = False,
    guard: Guard | None = None,
) -> SparseLayer:
    """Return a cache's layer over a small layer, with the middle in memory; the last arguments are fields of a
    config."""
    exact = tuple(
        torch.cat([rows[:, : layer.middle.start], rows[:, layer.middle.stop :]], 1)
        for rows in (layer.keys, layer.values)
    )
    inside = layer.keys[:, layer.middle], layer.values[:, layer.middle]
    middle = MemoryRows(*inside, selector.layout, layer.keys.device)
    facts, heads, device = layer.context.facts, len(exact[0]), layer.keys.device
    config = sparse("multipole", Multipole(), budget, ahead=ahead, gauge=gauge, guard=guard)
    plan = plan_layer(LayerParts(0, selector, middle, facts, SINKS, heads, device, device), config)
    return SparseLayer((exact[0], exact[1]), layer.split, plan)


def chosen_tokens(selection: Selection, selector: Selector, head: int, query: int) -> list[int]:
    """Return the middle positions that one head and query attend to, in the order in which they were chosen."""
    tokens: list[int] = []
    starts, lengths = selection.rows.starts[head, query].tolist(), selection.rows.lengths[head, query].tolist()
    for start, length in zip(starts, lengths, strict=True):
        rows = range(start, start + length)
        tokens += rows if selector.layout is None else [int(selector.layout[head, row]) for row in rows]
    return tokens


def all_chosen(selection: Selection, selector: Selector) -> list[list[list[int]]]:
    """Return `chosen_tokens` for every head and query."""
    heads, queries = selection.rows.starts.shape[:2]
    return [[chosen_tokens(selection, selector, head, query) for query in range(queries)] for head in range(heads)]


def as_queries(
    query: torch.Tensor, exact: torch.Tensor | None = None, *, joint: bool = False, first: int = 0
) -> Queries:
    """Return queries [Hk, G, Q, D] at positions from `first` on.

    `exact` [Hk, G, Q] is the log-sum-exp of the logits on exact rows; by default there are no such rows.
    """
    positions, nothing = first + torch.arange(query.shape[2]), torch.full(query.shape[:3], -torch.inf)
    return Queries(query, lambda: positions, lambda: nothing if exact is None else exact, joint)


def most_children(layer: SmallLayer) -> int:
    """Return the largest number of children that a cluster of the second-finest level has."""
    parent = layer.context.tensors["level0.parent"].long()
    return int(torch.stack([row.bincount().max() for row in parent]).max())
