"""The Pareto front and the order of a report's rows, against their definitions."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sparsekv.runtime.reporting.report import RecallRow, in_order, pareto_front

ROW = RecallRow(
    method="quest",
    variant="",
    budget=0.05,
    budget_tokens=50,
    selected_tokens=50.0,
    recall=0.5,
    attention_mass=0.5,
    output_error=0.1,
    kv_fraction=0.1,
    missed_mass=0.1,
    missed_estimate=None,
    recall_seen=None,
    list_coverage=None,
    raised=None,
    dense=None,
    layer=None,
    kv_head=None,
    together=1,
)
FEW = st.sampled_from([0.0, 0.1, 0.2, 0.3])
ROWS = st.lists(
    st.builds(
        lambda kv, error, layer, method: replace(
            ROW, kv_fraction=kv, output_error=error, layer=layer, method=method, variant=f"{kv} {error} {layer}"
        ),
        FEW,
        FEW,
        st.sampled_from([0, 1]),
        st.sampled_from(["quest", "codes", "oracle"]),
    ),
    max_size=12,
)


@given(ROWS)
def test_a_row_is_on_the_front_if_none_beats_it(rows: list[RecallRow]) -> None:
    def beats(one: RecallRow, other: RecallRow) -> bool:
        no_more = one.kv_fraction <= other.kv_fraction and one.output_error <= other.output_error
        return no_more and (one.kv_fraction, one.output_error) != (other.kv_fraction, other.output_error)

    usable = [row for row in rows if row.method != "oracle"]
    expected = [row for row in usable if not any(beats(one, row) for one in usable if one.layer == row.layer)]
    assert sorted(map(repr, pareto_front(rows))) == sorted(map(repr, expected))


def test_rows_are_in_the_order_of_budgets_and_of_errors_within_them() -> None:
    rows = [
        replace(ROW, budget_tokens=tokens, output_error=error, layer=layer)
        for layer in (1, 0)
        for tokens in (100, 50)
        for error in (0.3, 0.1)
    ]
    ordered = in_order(rows)
    assert sorted(map(repr, ordered)) == sorted(map(repr, rows))
    keys = [(row.layer, row.budget_tokens, row.output_error) for row in ordered]
    assert keys == sorted(keys)
