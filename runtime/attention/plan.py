"""Choice of one layer's executors and policies from its selector's capabilities and the config."""

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
    """Moves a layer's oldest tokens after the sinks to the indexed rows (the middle), from which the selector chooses.

    Before the move, these tokens are among the exact rows, to which every query attends: sinks, tail and new tokens.

    `torn` is True while rows move. If a move is interrupted, `torn` stays True, because index and rows may disagree.

    Args:
        sinks: number of sinks, which are the first exact rows and never move.
        device: the selector's device.
        prefetcher: its pending search is discarded at each append, because the index changes; None: nothing is
            prefetched.
    """

    index: Appending
    middle: MiddleRows
    sinks: int
    read: ReadRows
    device: torch.device
    prefetcher: Prefetcher | None
    torn: bool = False

    def append_due(self, layer: StoredLayer) -> None:
        """Append the oldest rows after the sinks to the index, in chunks of `index.size` rows.

        The newest full chunk and the rows after it stay exact. With fewer than two full chunks, nothing is appended.
        """
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
        """Undo all appends, if there were any: restore the stored index, the middle and the layer's exact rows.

        Args:
            tokens: number of tokens of the stored context.
            exact: keys and values [Hk, E, D] of sinks and tail.

        Raises:
            SparsekvError: an earlier call or an append was interrupted before it finished.
        """
        # This method runs in inference mode, because buffers that grew during decoding are inference tensors, which can
        # be written only in inference mode.
        if self.torn:
            raise SparsekvError(
                "an answer was interrupted while its tokens moved into the index, which cannot be undone; open a "
                "new session with `index.asker()`"
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
    """Inputs of `plan_layer` for one layer: its selector, its rows, and their devices.

    Args:
        number: index of the layer in its model.
        sinks: number of tokens before the middle, whose rows are always attended.
        heads: number of KV heads, Hk.
        device: the model's device.
        search_device: the selector's device.
        mapped: views of the index's files that the selector reads. The pages of the views are released after each
            search.
        question: selects for a question's tokens, if the config has a separate method for questions.
        gather_maker: makes the executor of all steps, which gathers rows. None: executors that attend without a copy
            are used where possible.
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

    `decode` runs decode steps, and `prefill` runs a question's tokens. `captured` runs decode steps while a
    `DynamicSlot` on the device has the new row's index, as in a CUDA graph. With `own_prefill`, the question's tokens
    select by the same method and budget as the answer's tokens. With `steps_alike`, a CUDA graph of one step can be
    replayed for all later steps, as far as policies, placement and appender are concerned. The selector may still
    prevent the replay.
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
        """Whether a question's tokens attend to all rows."""
        return isinstance(self.prefill, DensePrefill)

    @property
    def shareable(self) -> bool:
        """Whether several sequences can share a step.

        They can if nothing is appended, prefetched or measured, and if the selector's decode steps launch the same
        kernels (`Selector.graph_state`).
        """
        alone = self.appender is not None or self.prefetcher is not None or self.meter is not None
        return not alone and self.selector.graph_state() is not None

    def graph_state(self) -> int | None:
        """Return a number that changes when a step must be captured again; None: steps cannot be replayed."""
        return self.selector.graph_state() if self.steps_alike else None


def plan_layer(layer: LayerParts, config: DecodeConfig) -> LayerPlan:
    """Choose how one layer attends, from its selector's capabilities, the placement of its rows, and the config."""
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
    # A plain step only selects and attends: nothing is measured or prefetched, and there is no custom executor.
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
    """Choose the policy of a question's tokens.

    Args:
        asking: executor that attends to rows for a question's tokens.
        within: policy that selects by the layer's own selector and attends.
    """
    if isinstance(config.question, Dense):
        return DensePrefill(asking, layer.middle, within.read)
    if layer.question is not None:
        return ChunkedPrefill(layer.question, asking, layer.middle, within.read)
    if layer.selector.question_piece is not None:
        return PiecewisePrefill(within, layer.selector.question_piece)
    return within
