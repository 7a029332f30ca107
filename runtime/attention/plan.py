"""Executors and policies of one layer, picked once from its selector's capabilities and the options."""

from dataclasses import dataclass

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionSearch
from sparsekv.runtime.attention.executors import (
    FusedExecutor,
    GatherExecutor,
    GatherMaker,
    InPlaceExecutor,
    QuestionExecutor,
)
from sparsekv.runtime.attention.guard import MissedMeter
from sparsekv.runtime.attention.policies import (
    ChunkedPrefill,
    DensePrefill,
    Direct,
    Metered,
    PiecewisePrefill,
    Policy,
    Prefetcher,
    Prefetching,
)
from sparsekv.runtime.cache.buffers import ReadRows
from sparsekv.runtime.cache.kv_store import MiddleRows, Pair
from sparsekv.runtime.cache.stored_layer import StoredLayer
from sparsekv.runtime.selection.interface import Appending, Budget, Selector


@dataclass
class Appender:
    """Moves one layer's tokens from its exact rows to the middle and the selector's index.

    `torn` is True while rows move, and stays so where that was interrupted: index and rows may not fit then.

    Args:
        sinks: how many of the first exact rows are sinks, which never move.
        prefetcher: its pending search is discarded at each append, because the index changes.
    """

    index: Appending
    middle: MiddleRows
    sinks: int
    read: ReadRows
    device: torch.device
    prefetcher: Prefetcher | None
    torn: bool = False

    def append_due(self, layer: StoredLayer) -> None:
        """Append the oldest rows after the sinks, `size` at a time, until fewer than twice as many are left."""
        size, start = self.index.size, self.sinks
        if layer.used - start < 2 * size:
            return
        self.torn = True
        keys, values = layer.exact_rows()
        moved = ((layer.used - start) // size - 1) * size
        for first in range(start, start + moved, size):
            self._append((keys[:, first : first + size], values[:, first : first + size]))
        for rows in (keys, values):
            rows[:, start : layer.used - moved] = rows[:, start + moved :].clone()
        layer.used, layer.stored = layer.used - moved, layer.stored + moved
        self.torn = False

    def _append(self, new: Pair) -> None:
        if self.prefetcher is not None:
            self.prefetcher.forget()
        start = self.index.open_row()
        keys, values = (torch.cat(pair, 1) for pair in zip(self.middle.from_row(start), new, strict=True))
        appended = self.index.append(keys.to(self.device), values.to(self.device))
        self.middle.rewrite(start, new, appended.order)
        self.read.known += len(keys) * (appended.index_rows + 2 * keys.shape[1])

    @torch.inference_mode()
    def remove_appended(self, layer: StoredLayer, tokens: int, exact: Pair) -> None:
        """Restore the stored index, and the layer's stored tokens and exact rows [Hk, E, D] that belong to it.

        Raises:
            SparsekvError: an earlier call, or an append, was interrupted in the middle.
        """
        # In inference mode: rows that grew while a model decoded are inference tensors, writable in no other mode.
        if self.torn:
            raise SparsekvError(
                "an answer was interrupted while its tokens moved into the index, and cannot be undone; ask with a new "
                "asker"
            )
        self.torn = True
        order = self.index.remove()
        if order is not None:
            self.middle.rewrite(self.index.open_row(), None, order)
            layer.stored = tokens
            for rows, first in zip(layer.exact_rows(), exact, strict=True):
                rows.copy_(first)
        self.torn = False


@dataclass(frozen=True)
class LayerParts:
    """One layer of a cache before it is planned: its selector, its rows, and where these are.

    Args:
        number: the layer's in its model.
        sinks: how many of the exact rows come before the middle.
        heads: KV heads, Hk.
        device: the model's.
        search_device: the selector's.
        mapped: views of the index's files that the selector reads; their pages are released after each search.
        question: selects for a question's tokens, if the config gives them a method of their own.
        gather_maker: makes the executor of all steps, which gathers rows, instead of those that attend without a copy.
    """

    number: int
    selector: Selector
    middle: MiddleRows
    facts: LayerFacts
    sinks: int
    heads: int
    device: torch.device
    search_device: torch.device
    mapped: tuple[torch.Tensor, ...] = ()
    question: QuestionSearch | None = None
    gather_maker: GatherMaker | None = None


@dataclass(frozen=True)
class LayerPlan:
    """One layer's policies and the objects they share.

    `decode` runs decode steps, `captured` decode steps in a CUDA graph (the new row's position is in a
    `DynamicSlot`), and `prefill` a question's tokens; `own_prefill`: the selector chooses for these too.
    `steps_alike`: whether policies and placement allow one captured step to be replayed.
    """

    selector: Selector
    middle: MiddleRows
    read: ReadRows
    budget: Budget
    decode: Policy
    captured: Policy
    prefill: Policy
    gather: GatherExecutor
    appender: Appender | None
    prefetcher: Prefetcher | None
    meter: MissedMeter | None
    own_prefill: bool
    steps_alike: bool

    @property
    def prefills_densely(self) -> bool:
        """Whether a question's tokens attend to everything."""
        return isinstance(self.prefill, DensePrefill)

    @property
    def shareable(self) -> bool:
        """Whether several sequences can share a step's choice: steps are alike, and keep nothing of a sequence."""
        alone = self.appender is not None or self.prefetcher is not None or self.meter is not None
        return not alone and self.selector.graph_state() is not None

    def graph_state(self) -> int | None:
        """A number that changes when a captured step must be captured again; None: steps cannot be replayed."""
        return self.selector.graph_state() if self.steps_alike else None


def plan_layer(layer: LayerParts, config: DecodeConfig) -> LayerPlan:
    """Decide how one layer attends, by what its selector can do, where its rows are, and the config."""
    selector, middle = layer.selector, layer.middle
    read, budget = ReadRows(layer.heads, layer.device), config.budget_of(layer.number)
    meter = MissedMeter(config.guard) if config.measured else None
    make = layer.gather_maker or GatherExecutor
    gather = make(selector, middle, layer.search_device, layer.mapped, fetch_rest=meter is not None)
    prefetcher = Prefetcher(lambda queries: gather.find(queries, budget)) if config.ahead else None
    appender = None
    if (index := selector.append) is not None:
        appender = Appender(index, middle, layer.sinks, read, layer.search_device, prefetcher)
    measured = None if meter is None else Metered(gather, prefetcher, budget, layer.facts, meter, middle, read)
    # All that a step does is to select and to attend: nothing is measured, prefetched or passed to a maker's executor.
    plain = measured is None and prefetcher is None and layer.gather_maker is None
    captured: Policy
    if measured is not None:
        captured = measured
    elif prefetcher is not None:
        captured = Prefetching(prefetcher, middle, read)
    else:
        in_place = plain and middle.reachable
        executor = InPlaceExecutor(selector, middle, read.by_kernels, gather) if in_place else gather
        captured = Direct(executor, budget, middle, read)
    fused = plain and layer.device.type != "cuda"
    asking = gather
    if layer.device.type == "cuda" and measured is None and layer.gather_maker is None and middle.reachable:
        asking = QuestionExecutor(selector, middle, layer.search_device)
    return LayerPlan(
        selector=selector,
        middle=middle,
        read=read,
        budget=budget,
        decode=Direct(FusedExecutor(selector, middle, gather), budget, middle, read) if fused else captured,
        captured=captured,
        prefill=_prefill(layer, config, asking, measured or Direct(asking, budget, middle, read)),
        gather=gather,
        appender=appender,
        prefetcher=prefetcher,
        meter=meter,
        own_prefill=isinstance(config.question, Own),
        steps_alike=plain and middle.reachable and appender is None,
    )


def _prefill(layer: LayerParts, config: DecodeConfig, asking: GatherExecutor, within: Direct | Metered) -> Policy:
    """The policy of a question's tokens; `within` attends to what the layer's own selector chooses for them."""
    if isinstance(config.question, Dense):
        return DensePrefill(asking, layer.middle, within.read)
    if layer.question is not None:
        return ChunkedPrefill(layer.question, asking, layer.middle, within.read)
    if layer.selector.question_piece is not None:
        return PiecewisePrefill(within, layer.selector.question_piece)
    return within
