"""Picks one layer's executors and policies, once, from its selector's capabilities and the config."""

from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.runtime.attention.append import Appender
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own
from sparsekv.runtime.attention.executors import (
    FusedExecutor,
    GatherExecutor,
    GatherMaker,
    InPlaceExecutor,
)
from sparsekv.runtime.attention.guard import MissedMeter
from sparsekv.runtime.attention.policies import (
    Budgeted,
    ChunkedPrefill,
    DensePrefill,
    Direct,
    Measured,
    PiecewisePrefill,
    Policy,
    Prefetching,
)
from sparsekv.runtime.attention.prefetch import Prefetcher
from sparsekv.runtime.attention.question import QuestionSearch
from sparsekv.runtime.attention.question_executor import QuestionExecutor
from sparsekv.runtime.cache.kv_store import MiddleRows
from sparsekv.runtime.cache.read_rows import ReadRows
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.capabilities import Appendable, GraphState, SharesByToken
from sparsekv.runtime.selection.interface import Selector


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

    `decode` runs decode steps, `captured` decode steps in a CUDA graph (the new row's position is in a `StepRow`), and
    `prefill` a question's tokens; `own_prefill`: the selector chooses for these too. `steps_alike`: whether policies
    and placement allow one captured step to be replayed.
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
    graph: GraphState | None

    @property
    def prefills_densely(self) -> bool:
        """Whether a question's tokens attend to everything."""
        return isinstance(self.prefill, DensePrefill)

    @property
    def shareable(self) -> bool:
        """Whether several sequences can share a step's choice: steps are alike, and keep nothing of a sequence."""
        alone = self.appender is not None or self.prefetcher is not None or self.meter is not None
        return not alone and (self.graph is None or self.graph.graph_state() is not None)

    def graph_state(self) -> int | None:
        """A number that changes when a captured step must be captured again; None: steps cannot be replayed."""
        if not self.steps_alike:
            return None
        return 0 if self.graph is None else self.graph.graph_state()


def plan_layer(layer: LayerParts, config: DecodeConfig) -> LayerPlan:
    """Decide how one layer attends, by what its selector can do, where its rows are, and the config."""
    selector, middle = layer.selector, layer.middle
    read, budget = ReadRows(layer.heads, layer.device), config.budget_of(layer.number)
    meter = MissedMeter(config.guard) if config.measured else None
    make = layer.gather_maker or GatherExecutor
    gather = make(selector, middle, layer.search_device, layer.mapped, fetch_rest=meter is not None)
    prefetcher = Prefetcher(lambda queries: gather.find(queries, budget)) if config.ahead else None
    appender = None
    if isinstance(selector, Appendable) and selector.append_size:
        appender = Appender(selector, middle, layer.sinks, read, layer.search_device, prefetcher)
    measured = None if meter is None else Measured(gather, prefetcher, budget, layer.facts, meter, middle, read)
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
        graph=selector if isinstance(selector, GraphState) else None,
    )


def _prefill(layer: LayerParts, config: DecodeConfig, asking: GatherExecutor, within: Budgeted) -> Policy:
    """The policy of a question's tokens; `within` attends to what the layer's own selector chooses for them."""
    if isinstance(config.question, Dense):
        return DensePrefill(asking, layer.middle, within.read)
    if layer.question is not None:
        return ChunkedPrefill(layer.question, asking, layer.middle, within.read)
    if isinstance(layer.selector, SharesByToken):
        return PiecewisePrefill(within, layer.selector.question_piece)
    return within
