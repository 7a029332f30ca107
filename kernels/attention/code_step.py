"""A decode step over codes on a CPU, in one compiled kernel."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sparsekv.kernels.attention.compiled import compiled_kernels, have_addresses, in_reach
from sparsekv.kernels.attention.types import CodeTensors

if TYPE_CHECKING:
    from sparsekv.kernels.attention.compiled_code_step import CompiledCodeStep


@dataclass(frozen=True)
class StepCodes(CodeTensors):
    """`CodeTensors` with the compiled kernel for them."""

    @cached_property
    def compiled(self) -> "CompiledCodeStep | None":
        """The compiled kernel for these tensors; None if there is none, or it does not take their dtype or layout."""
        wide = self.turn, self.books, self.centroids, self.masses, self.values
        wanted = [(tensor, torch.float32) for tensor in wide]
        wanted += [(self.codes, torch.uint8), (self.labels, torch.int32), (self.counts, torch.int32)]
        if not have_addresses(*wanted):
            return None
        kernels = compiled_kernels("compiled_code_step")
        return None if kernels is None else kernels.CompiledCodeStep(self)


def attend_by_codes(
    query: torch.Tensor,
    codes: StepCodes,
    rows: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
    budget: int,
    *,
    replace: bool,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """One softmax over the rows of highest score, exact rows and, with `replace`, centroids for all other rows; None
    where no compiled kernel takes all of these.

    A row's score is its probability by its code, the mean over the group: exp(logit - total), where the logit is the
    sum over the parts of the turned query's products with the centroids that the code names, and the total is the
    log-sum-exp of the exact rows' logits, of the clusters' logits and masses, and of the sinks. Rows whose scores
    differ by rounding, one part in 10,000, may take each other's place. A centroid's weight is that of its cluster,
    times the share of it that is not chosen.

    Args:
        query: [H, G, D].
        rows: keys and values [H, M or more, D]; a head's rows are contiguous, heads need not be.
        exact: keys and values [H, E, D] that are always attended, with the same layout.
        budget: rows to choose in each head, at least 1 and at most M.
        replace: let centroids represent the tokens that are not chosen.
        sink_logits: [H, G] learned logits that take part in both softmaxes and carry no value.

    Returns:
        [H, G, D].
    """
    compiled = codes.compiled
    if compiled is None or not in_reach(query, *rows, *exact):
        return None
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    return compiled.attend(query.contiguous(), rows, exact, budget, replace, sinks)


def choose_by_codes(query: torch.Tensor, codes: StepCodes, beside: torch.Tensor, budget: int) -> torch.Tensor | None:
    """The rows that `attend_by_codes` attends to; None where no compiled kernel takes all of these.

    Args:
        query: [H, G, D].
        beside: [H, G] log-sum-exp of the logits of what is attended beside the H heads' rows and clusters.
        budget: rows to choose in each head, at least 1 and at most M.

    Returns:
        [H, budget] int32, in order of their places.
    """
    compiled = codes.compiled
    if compiled is None or not in_reach(query):
        return None
    return compiled.choose(query.contiguous(), beside.float().contiguous(), budget)
