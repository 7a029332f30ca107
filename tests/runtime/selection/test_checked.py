"""A method of another package that selects wrongly ends in a line that names it, and never in an answer."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from support.small_layer import as_queries, small_layer

from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.methods.keydiff import KeyDiff
from sparsekv.runtime.selection.checked import CheckedSelector, code_of, prepare_selector
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    RowSet,
    Selection,
    Selector,
    single_rows,
)

MIDDLE = 40


def _first(queries: Queries, tokens: int) -> Selection:
    heads, _, asked, _ = queries.query.shape
    return Selection(single_rows(torch.arange(tokens).expand(heads, asked, tokens)), Cost(1.0))


class Faulty(Selector):
    """Selects the first tokens, changed by a fault."""

    def __init__(self, fault: Callable[[Selection], object], layout: torch.Tensor | None):
        self.fault, self.layout = fault, layout

    def select(self, queries: Queries, budget: Budget) -> Selection:
        return self.fault(_first(queries, budget.tokens(MIDDLE)))  # type: ignore[return-value]  # a fault may be this, too


@dataclass(frozen=True)
class Stranger(Method):
    """A method of a package that is not sparsekv."""

    fault: Callable[[Selection], object]
    layout: torch.Tensor | None = None

    def prepare(self, context: MiddleContext) -> Selector:
        return Faulty(self.fault, self.layout)


def _rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Selection], Selection]:
    return lambda found: replace(found, rows=single_rows(change(found.rows.starts)))


def _cost(read: torch.Tensor | float) -> Callable[[Selection], Selection]:
    return lambda found: replace(found, cost=Cost(read))


def _raise(found: Selection) -> Selection:
    raise ValueError("of my own\nin two lines")


def _exit(found: Selection) -> Selection:
    raise SystemExit(7)


def _weights(weights: torch.Tensor) -> Callable[[Selection], Selection]:
    return lambda found: replace(found, rows=replace(found.rows, log_weights=weights))


def _runs(length: int) -> Callable[[Selection], Selection]:
    """Runs of this length from each of the first tokens."""

    def change(found: Selection) -> Selection:
        lengths = torch.full_like(found.rows.starts, length)
        return replace(found, rows=RowSet(found.rows.starts, lengths, length * lengths.shape[2]))

    return change


FAULTS: dict[str, tuple[Callable[[Selection], object], str]] = {
    "none": (lambda found: None, "the type NoneType"),
    "a mask": (_rows(lambda rows: rows > 2), "starts of dtype torch.bool"),
    "floats": (_rows(torch.Tensor.double), "starts of dtype torch.float64"),
    "one head": (_rows(lambda rows: rows[:1]), "starts of shape [1, 3, 5]"),
    "no heads": (_rows(lambda rows: rows[0]), "starts of shape [3, 5]"),
    "one too far": (_rows(lambda rows: rows + MIDDLE - 4), "rows outside of 0 to 39"),
    "before the first": (_rows(lambda rows: rows - 1), "rows outside of 0 to 39"),
    "twice": (_rows(lambda rows: rows // 2), "a row twice"),
    "runs that overlap": (_runs(2), "a row twice"),
    "runs past the end": (_runs(MIDDLE - 3), "rows outside of 0 to 39"),
    "a small capacity": (lambda found: replace(found, rows=replace(found.rows, capacity=4)), "a capacity of 4"),
    "another total": (lambda found: replace(found, rows=replace(found.rows, total=9)), "a total of 9"),
    "a negative cost": (_cost(-1000.0), "the cost -1000.0"),
    "no number": (_cost(float("nan")), "the cost nan"),
    "negative costs": (_cost(torch.full((2, 1), -1.0)), "a cost that is negative"),
    "a cost without axes": (_cost(torch.tensor(100.0)), "a cost of shape [], not a number or a tensor [2, 1 or 3]"),
    "a cost of one axis": (_cost(torch.ones(1)), "a cost of shape [1], not"),
    "a cost of one head": (_cost(torch.ones(1, 1)), "a cost of shape [1, 1], not"),
    "a cost of nine heads": (_cost(torch.ones(9, 1)), "a cost of shape [9, 1], not"),
    "a complex cost": (_cost(torch.ones(2, 1, dtype=torch.complex64)), "a cost of dtype torch.complex64"),
    "a cost elsewhere": (_cost(torch.ones(2, 1, device="meta")), "a cost on meta and starts on cpu"),
    "no cost": (lambda found: Selection(found.rows, 1.0), "a cost of the type float, not Cost"),  # type: ignore[arg-type]
    "short weights": (_weights(torch.zeros(2, 3, 3, 4)), "log_weights of shape [2, 3, 3, 4], not [2, 3, 1 or 3, 5]"),
    "weights in bfloat16": (
        _weights(torch.zeros(2, 3, 3, 5, dtype=torch.bfloat16)),
        "log_weights of dtype torch.bfloat16, not float32",
    ),
    "an exit": (_exit, "failed: SystemExit: 7 (test_checked.py, line "),
    "an error": (_raise, "failed: ValueError: of my own in two lines (test_checked.py, line "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_selection_is_refused_with_its_reason(name: str) -> None:
    layer = small_layer(middle=MIDDLE)
    fault, says = FAULTS[name]
    selector = prepare_selector(Stranger(fault), layer.context)
    queries = as_queries(layer.queries[:, :, :3])
    with pytest.raises(SparsekvError) as refused:
        selector.select(queries, Budget(5))
    assert says in str(refused.value)
    assert str(refused.value).startswith("the method Stranger of the package ")
    assert str(refused.value).endswith("; correct the method")


@torch.inference_mode()
def test_a_selector_that_changes_its_query_is_refused() -> None:
    """The change would alter the attention's output. Answers run in inference mode, too."""
    layer = small_layer(middle=MIDDLE)
    queries = as_queries(layer.queries.clone())

    def scale(found: Selection) -> Selection:
        queries.query.mul_(2)
        return found

    selector = prepare_selector(Stranger(scale), layer.context)
    with pytest.raises(SparsekvError, match=r"method Stranger of .*: `select` changes `queries.query` in place"):
        selector.select(queries, Budget(5))
    queries.query.fill_(torch.nan)
    prepare_selector(Stranger(lambda found: found), layer.context).select(queries, Budget(5))


@pytest.mark.parametrize("cost", [7, 7.0, torch.full((2, 1), 7), torch.full((2, 3), 7.0)])
def test_a_cost_counts_for_each_head_in_every_form(cost: torch.Tensor | float) -> None:
    layer = small_layer(middle=MIDDLE)
    checked = prepare_selector(Stranger(_cost(cost)), layer.context)
    selection = checked.select(as_queries(layer.queries[:, :, :3]), Budget(5))
    assert torch.as_tensor(selection.rows_read()).expand(2, 3).eq(2 * 5 + 7).all()


def test_a_right_selection_is_the_methods_own() -> None:
    layer = small_layer(middle=MIDDLE)
    queries = as_queries(layer.queries)
    checked = prepare_selector(Stranger(lambda found: found), layer.context)
    assert isinstance(checked, CheckedSelector)
    assert torch.equal(checked.select(queries, Budget(5)).rows.starts, _first(queries, 5).rows.starts)
    assert not isinstance(prepare_selector(KeyDiff(), layer.context), CheckedSelector)


@pytest.mark.parametrize("change", [lambda order: order + 1, lambda order: order[:, 1:], lambda order: order.int()])
def test_a_layout_that_is_no_order_is_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer = small_layer(middle=MIDDLE)
    order = torch.arange(MIDDLE).expand(layer.context.keys.shape[0], -1)
    prepare_selector(Stranger(lambda found: found, order), layer.context)
    with pytest.raises(SparsekvError, match="its layout is not each position 0 to 39 once"):
        prepare_selector(Stranger(lambda found: found, change(order)), layer.context)


def test_a_layout_that_is_no_tensor_is_refused() -> None:
    layer = small_layer(middle=MIDDLE)
    layout: list[int] = list(range(MIDDLE))
    with pytest.raises(SparsekvError, match=r"method Stranger .*: its layout is of the type list, not a tensor"):
        prepare_selector(Stranger(lambda found: found, layout), layer.context)  # type: ignore[arg-type]  # the fault


def test_an_error_in_a_library_is_placed_at_the_packages_call() -> None:
    layer = small_layer(middle=MIDDLE)
    queries = as_queries(layer.queries)
    selector = prepare_selector(Stranger(lambda found: json.loads("not JSON")), layer.context)
    with pytest.raises(SparsekvError, match=r"failed: JSONDecodeError: .* \(test_checked.py, line "):
        selector.select(queries, Budget(5))


def test_a_packages_code_is_part_of_what_decides_an_answer() -> None:
    assert code_of(KeyDiff) is None
    assert len(code_of(Stranger) or "") == 64


def test_an_edited_package_has_another_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "__init__.py").write_text("from strange.choice import Choice\n")
    file = tmp_path / "strange" / "choice.py"
    file.write_text("class Choice: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("strange").Choice
    before = code_of(method)
    assert code_of(method) == before
    file.write_text("class Choice: pass  # another\n")
    assert code_of(method) != before
