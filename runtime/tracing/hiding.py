"""Attention that hides some tokens of the document, as far as this is possible without another prefill."""

from dataclasses import replace
from typing import Any

import torch

from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.runtime.attention.executors import Fetched, GatherExecutor, LayerOutput, attend_in_layout
from sparsekv.runtime.attention.step import Step
from sparsekv.runtime.reporting.recall import chosen_positions
from sparsekv.runtime.selection.interface import CentroidSegment, Selection, Selector


class HidingExecutor(GatherExecutor):
    """Executor that selects as a `GatherExecutor` does and gives hidden tokens no attention.

    Rows of hidden tokens are masked, whether they were selected or are always attended to (sinks, tail). If the method
    reports each token's centroid, a centroid's token count is reduced by the hidden tokens that it represents. The
    centroid's key and value stay the means over all its tokens.

    Args:
        layer, options: the arguments of `GatherExecutor`.
        hidden: [N] bool, True for the hidden ones of the prompt's N tokens, in order of position.
        sinks: number of tokens before the middle.
    """

    def __init__(self, *layer: Any, hidden: torch.Tensor, sinks: int, **options: Any):
        super().__init__(*layer, **options)
        self.hidden, self.sinks = hidden, sinks

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        return attend_in_layout(self, step)

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> LayerOutput:
        hidden = self.hidden.to(step.query.device)
        middle = hidden[self.sinks : self.sinks + self.middle.used]
        beside = torch.cat([hidden[: self.sinks], hidden[self.sinks + self.middle.used :]])
        fetched = self._without(self.fetch(selection, step.query.device), selection, selector, middle)
        chosen, exact, *rest = fetched.segments(step)
        output = attend(step.query, [chosen, _masked(exact, beside), *rest], *step.how)
        return LayerOutput(output, fetched.rows_read)

    def _without(self, fetched: Fetched, selection: Selection, selector: Selector, hidden: torch.Tensor) -> Fetched:
        """Mark the fetched rows of hidden tokens [M] as not valid.

        If the method reports each token's centroid, also reduce the token counts of attended centroids.
        """
        positions = chosen_positions(selection.rows, self.selector.layout, len(hidden)).to(hidden.device)
        shown = ~torch.cat([hidden, hidden.new_ones(1)])[positions]
        valid = shown if fetched.valid is None else shown & fetched.valid
        rest, report = fetched.rest, selector.report
        if fetched.rest_attended and report is not None and report.centroid_of is not None:
            left = torch.ones(len(positions), len(hidden) + 1, device=hidden.device)
            left = left.scatter_(1, positions[:, -1], 0.0)[:, :-1]
            rest = _fewer(rest, report.centroid_of(rest).to(hidden.device), left, hidden)
        return replace(fetched, valid=valid, rest=rest)


def _masked(exact: Segment, hidden: torch.Tensor) -> Segment:
    """Mask the hidden tokens [E] among the rows of sinks and tail; the rows of new tokens follow them."""
    shown = torch.ones(exact.keys.shape[1], dtype=torch.bool, device=hidden.device)
    shown[: len(hidden)] = ~hidden
    return replace(exact, mask=shown if exact.mask is None else exact.mask & shown)


def _fewer(
    rest: tuple[CentroidSegment, ...], numbers: torch.Tensor, left: torch.Tensor, hidden: torch.Tensor
) -> tuple[CentroidSegment, ...]:
    """Reduce the token count of each centroid by the hidden tokens that it represents.

    Args:
        numbers: [Hk, M] int64, index of each token's centroid, counted through the segments.
        left: [Hk, M], 1 for a token that a centroid represents, else 0.
    """
    sizes = [part.keys.shape[1] for part in rest]
    none = torch.zeros(len(numbers), sum(sizes), device=left.device)
    counts, shown = (none.scatter_add(1, numbers, some) for some in (left, left * ~hidden))
    shares = (shown / counts.clamp(min=1)).log().split(sizes, 1)
    return tuple(
        replace(part, log_counts=part.log_counts + share[:, None], scored=None)
        for part, share in zip(rest, shares, strict=True)
    )
