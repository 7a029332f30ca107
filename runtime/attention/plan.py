"""Picks one layer's executors and policies, once, from its selector's capabilities and the user's options."""

from dataclasses import dataclass

import torch

from sparsekv.formats.schema import LayerFacts
from sparsekv.runtime.attention.append import Appender
from sparsekv.runtime.attention.executors import (
    Executor,
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
class LayerOptions:
    """The user's options for one layer.

    Args:
        prefetch: search for the next decode step's rows during this one's attention.
        meter: the missed-mass meter; its guard, if it has one, sets a limit.
        search_device: the selector's; None: the model's.
        mapped: views of the index's files that the selector reads; their pages are released after each search.
        question: selects for a question's tokens in place of the layer's selector.
        dense_question: a question's tokens attend to everything; then nothing selects for them.
        gather_maker: makes the executor of all steps, which gathers rows, in place of those that attend without a copy.
    """

    prefetch: bool = False
    meter: MissedMeter | None = None
    search_device: torch.device | None = None
    mapped: tuple[torch.Tensor, ...] = ()
    question: QuestionSearch | None = None
    dense_question: bool = False
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


def plan_layer(
    selector: Selector,
    middle: MiddleRows,
    facts: LayerFacts,
    sinks: int,
    budget: Budget,
    heads: int,
    device: torch.device,
    options: LayerOptions,
) -> LayerPlan:
    """One layer's plan.

    Args:
        sinks: how many of the exact rows come before the middle.
        heads: KV heads, Hk.
        device: the model's.
    """
    read, where, make = ReadRows(heads, device), options.search_device or device, options.gather_maker or GatherExecutor
    gather = make(selector, middle, where, options.mapped, fetch_rest=options.meter is not None)
    prefetcher = Prefetcher(lambda queries: gather.find(queries, budget)) if options.prefetch else None
    appendable = selector if isinstance(selector, Appendable) and selector.append_size else None
    appender = None if appendable is None else Appender(appendable, middle, sinks, read, where, prefetcher)
    shared = _Shared(selector, middle, facts, budget, read, gather, prefetcher, options)
    plain = options.meter is None and prefetcher is None and options.gather_maker is None
    return LayerPlan(
        selector=selector,
        middle=middle,
        read=read,
        budget=budget,
        decode=_decode(shared, device),
        captured=_captured(shared),
        prefill=_prefill(shared, device),
        gather=gather,
        appender=appender,
        prefetcher=prefetcher,
        meter=options.meter,
        own_prefill=options.question is None and not options.dense_question,
        steps_alike=plain and middle.reachable and appender is None,
        graph=selector if isinstance(selector, GraphState) else None,
    )


@dataclass(frozen=True)
class _Shared:
    """What the policies of a layer are made of."""

    selector: Selector
    middle: MiddleRows
    facts: LayerFacts
    budget: Budget
    read: ReadRows
    gather: GatherExecutor
    prefetcher: Prefetcher | None
    options: LayerOptions

    def direct(self, executor: Executor) -> Budgeted:
        return Direct(executor, self.budget, self.middle, self.read)

    def measured(self, meter: MissedMeter) -> Budgeted:
        return Measured(self.gather, self.prefetcher, self.budget, self.facts, meter, self.middle, self.read)


def _decode(shared: _Shared, device: torch.device) -> Policy:
    """On a CPU, with nothing measured, prefetched or gathered, the fused executor; otherwise what `_captured` gives."""
    options = shared.options
    if options.meter is None and shared.prefetcher is None and options.gather_maker is None and device.type != "cuda":
        return shared.direct(FusedExecutor(shared.selector, shared.middle, shared.gather))
    return _captured(shared)


def _captured(shared: _Shared) -> Policy:
    """The policy of steps between `reserve` and `release`; only `Direct` in place is ever captured in a CUDA graph."""
    if shared.options.meter is not None:
        return shared.measured(shared.options.meter)
    if shared.prefetcher is not None:
        return Prefetching(shared.prefetcher, shared.middle, shared.read)
    if shared.options.gather_maker is not None or not shared.middle.reachable:
        return shared.direct(shared.gather)
    return shared.direct(InPlaceExecutor(shared.selector, shared.middle, shared.read.by_kernels, shared.gather))


def _prefill(shared: _Shared, device: torch.device) -> Policy:
    """The policy of a question's tokens."""
    meter, options, gather = shared.options.meter, shared.options, shared.gather
    if device.type == "cuda" and meter is None and options.gather_maker is None and shared.middle.reachable:
        gather = QuestionExecutor(shared.selector, shared.middle, gather.search_device)
    if options.dense_question:
        return DensePrefill(gather, shared.middle, shared.read)
    if options.question is not None:
        return ChunkedPrefill(options.question, gather, shared.middle, shared.read)
    policy = shared.direct(gather) if meter is None else shared.measured(meter)
    if isinstance(shared.selector, SharesByToken):
        return PiecewisePrefill(policy, shared.selector.question_piece)
    return policy
