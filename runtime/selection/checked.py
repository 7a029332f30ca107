"""Check the selections of methods from other packages.

An invalid selection would give wrong measurements, or read wrong memory.
"""

import hashlib
import math
import sys
from copy import copy
from pathlib import Path
from typing import Any

import torch

from sparsekv.formats.registry import OURS, package_of, told_of, wrong_class
from sparsekv.runtime.selection.interface import (
    Appending,
    Budget,
    ConversationState,
    Cost,
    Method,
    MiddleContext,
    Queries,
    Residual,
    RowSet,
    Selection,
    Selector,
    SelectorKernels,
    SelectorReport,
)


def prepare_selector(method: Method, context: MiddleContext) -> Selector:
    """Prepare a method's selector for one layer. The selections of a method of another package are checked.

    For a method of another package the layer's keys are loaded once more, because the checks need their shape.

    Raises:
        SparsekvError: a method of another package fails, or its selector or layout is not valid. Also raises the errors
            of the method's `prepare`.
    """
    if package_of(type(method)) == OURS:
        return method.prepare(context)
    with told_of(type(method)):
        selector = method.prepare(context)
    if not isinstance(selector, Selector):
        raise wrong_class(type(method), f"`prepare` returns {type(selector).__name__}, not a Selector")
    Hk, M, _ = context.load_keys().shape
    if (layout := selector.layout) is not None:
        if not isinstance(layout, torch.Tensor):
            raise wrong_class(type(method), f"its layout is of the type {type(layout).__name__}, not a tensor")
        everywhere = torch.arange(M, device=layout.device).expand(Hk, M)
        if layout.shape != (Hk, M) or layout.dtype != torch.int64 or not torch.equal(layout.sort().values, everywhere):
            raise wrong_class(
                type(method), f"its layout is not each position 0 to {M - 1:,} once for each of {Hk} heads, int64"
            )
    return CheckedSelector(selector, method, (Hk, M))


def code_of(method: type) -> str | None:
    """Return the sha256 of the source files of a method's package; None for a method of this package.

    Only modules that are imported count. A package without source files has the sha256 of no bytes.
    """
    package = package_of(method)
    if package == OURS:
        return None
    names = [name for name in sys.modules if name.partition(".")[0] == package]
    files = {Path(file) for name in names if (file := getattr(sys.modules[name], "__file__", None))}
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files) if file.is_file())).hexdigest()


class CheckedSelector(Selector):
    """Checks each selection of an inner selector. The inner selector's optional functions are passed on unchecked.

    Args:
        inner: the selector of another package's method.
        shape: (Hk, M), the number of KV heads and of tokens between sinks and tail.
    """

    def __init__(self, inner: Selector, method: Method, shape: tuple[int, int]):
        self.inner, self.method, self.shape = inner, method, shape
        self.layout, self.question_piece = inner.layout, inner.question_piece

    def select(self, queries: Queries, budget: Budget) -> Selection:
        """Return the inner selector's selection after checking it.

        While a CUDA graph is captured, no values are checked, because the same step has run before without a graph.

        Raises:
            SparsekvError: the inner selector fails, it changes the query, or its selection is not valid.
        """
        # The query is compared by its values, because torch counts no versions of tensors in inference mode.
        before = None if _is_captured(queries) else queries.query.clone()
        with told_of(type(self.method)):
            selection: Any = self.inner.select(queries, budget)
            fault = self._fault(selection, queries)
        if before is not None and not torch.allclose(queries.query, before, rtol=0, atol=0, equal_nan=True):
            raise wrong_class(
                type(self.method), "`select` changes `queries.query` in place, which attention reads next"
            )
        if fault is not None:
            raise wrong_class(type(self.method), f"a selection has {fault}")
        checked: Selection = selection
        return checked

    def _fault(self, selection: Any, queries: Queries) -> str | None:
        """Return the fault of a selection, as words for an error message; None if it has none."""
        if not (isinstance(selection, Selection) and isinstance(selection.rows, RowSet)):
            return f"the type {type(selection).__name__}, not Selection"
        fault = _form_fault(selection.rows, queries) or _cost_form_fault(selection, queries)
        if fault is not None or _is_captured(queries):
            return fault
        if selection.rows.total == 0 and queries.in_place is not None:
            return None  # kernels have written and counted the rows
        return _value_fault(selection, self.shape[1])

    @property
    def kernels(self) -> SelectorKernels | None:
        return self.inner.kernels

    @property
    def conversation(self) -> ConversationState | None:
        return self.inner.conversation

    @property
    def append(self) -> Appending | None:
        return self.inner.append

    @property
    def report(self) -> SelectorReport | None:
        return self.inner.report

    def graph_state(self) -> int | None:
        return self.inner.graph_state()

    def replace_by_own(self) -> bool:
        return self.inner.replace_by_own()

    def rest_of(self, chosen: torch.Tensor) -> Residual:
        return self.inner.rest_of(chosen)

    def __copy__(self) -> "CheckedSelector":
        """Copy the inner selector too, so that the copy has its own conversation state."""
        return CheckedSelector(copy(self.inner), self.method, self.shape)


def _is_captured(queries: Queries) -> bool:
    """Whether a CUDA graph captures the step. Then the host cannot read values."""
    return queries.query.is_cuda and torch.cuda.is_current_stream_capturing()


def _form_fault(rows: RowSet, queries: Queries) -> str | None:
    """Return the fault of a row set's dtypes and shapes, as words for an error message; None if there is none."""
    Hk, G, Q, _ = queries.query.shape
    asked = {1} if queries.joint else {1, Q}
    wanted = " or ".join(map(str, sorted(asked)))
    for name, tensor in (("starts", rows.starts), ("run_lengths", rows.run_lengths)):
        if tensor is None:
            continue
        if tensor.dtype not in (torch.int32, torch.int64):
            return f"{name} of dtype {tensor.dtype}, not int32 or int64"
        if tensor.ndim != 3 or tensor.shape[0] != Hk or tensor.shape[1] not in asked:
            return f"{name} of shape {list(tensor.shape)}, not [{Hk}, {wanted}, runs]"
    if rows.run_lengths is not None and rows.run_lengths.shape != rows.starts.shape:
        return f"run_lengths of shape {list(rows.run_lengths.shape)} for starts of shape {list(rows.starts.shape)}"
    if (weights := rows.log_weights) is not None:
        if weights.dtype != torch.float32:
            return f"log_weights of dtype {weights.dtype}, not float32"
        if weights.shape not in [(Hk, G, one, rows.capacity) for one in asked]:
            return f"log_weights of shape {list(weights.shape)}, not [{Hk}, {G}, {wanted}, {rows.capacity}]"
    return None


def _cost_form_fault(selection: Selection, queries: Queries) -> str | None:
    """Return the fault of a cost's type, shape, dtype or device, as words for an error message; None if none."""
    cost: Any = selection.cost  # from another package's code, so it may have any type
    if not isinstance(cost, Cost):
        return f"a cost of the type {type(cost).__name__}, not Cost"
    read, (Hk, _, Q, _) = cost.index_rows, queries.query.shape
    if not isinstance(read, torch.Tensor):
        valid = isinstance(read, int | float) and math.isfinite(read) and read >= 0
        return None if valid else f"the cost {read!r}, not a number of rows from 0 on"
    # Another shape would be counted once and not for each KV head, or be broadcast to other numbers.
    if read.shape not in ((Hk, 1), (Hk, Q)):
        wanted = " or ".join(map(str, sorted({1, Q})))
        return f"a cost of shape {list(read.shape)}, not a number or a tensor [{Hk}, {wanted}]"
    if read.is_complex() or read.dtype == torch.bool:
        return f"a cost of dtype {read.dtype}, not integers or floats"
    if read.device != selection.rows.starts.device:
        return f"a cost on {read.device} and starts on {selection.rows.starts.device}"
    return None


def _value_fault(selection: Selection, middle: int) -> str | None:
    """Return the fault of a selection's numbers, as words for an error message; None if none. Waits for a GPU."""
    rows, read = selection.rows, selection.cost.index_rows
    lengths = rows.lengths
    stops = rows.starts.long() + lengths
    if bool(((rows.starts < 0) | (lengths < 0) | (stops > middle)).any()):
        return f"rows outside of 0 to {middle - 1:,}, the middle's tokens"
    counts = lengths.sum(-1)
    if int(counts.max()) > rows.capacity:
        return f"{int(counts.max()):,} rows and a capacity of {rows.capacity:,}"
    if rows.total is not None and bool((counts != rows.total).any()):
        return f"{int(counts.min()):,} to {int(counts.max()):,} rows a query and a total of {rows.total:,}"
    places, valid = rows.expand()
    places = (places if valid is None else places.masked_fill(~valid, -1)).sort(-1).values
    if bool(((places.diff(dim=-1) == 0) & (places[..., 1:] >= 0)).any()):
        return "a row twice"
    if isinstance(read, torch.Tensor) and not bool((read.isfinite() & (read >= 0)).all()):
        return "a cost that is negative or no number"
    if rows.log_weights is not None and bool(rows.log_weights.isnan().any()):
        return "log_weights that are no numbers"
    return None
