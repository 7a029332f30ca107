"""The legend of a recall report's table: what its columns say, and what looks odd in the rows that it has."""

from collections.abc import Iterable, Sequence

from sparsekv.runtime.reporting.front import pareto_front
from sparsekv.runtime.reporting.report import RecallRow
from sparsekv.runtime.selection.layer_sharing import LayerSharing
from sparsekv.runtime.selection.registry import methods

LEGEND = """\
*: on the Pareto front: no method here reads less of the document and errs less.
recall: share of the oracle's tokens that were selected. attention mass: share of the attention on the document that
they have. output error: of attention's output, relative. kv fraction: what is read of the document's keys and values,
index included. missed: share of all attention on tokens that were not selected."""
OPTIONAL = {
    "missed_estimate": "missed estimate: what a step can tell of missed by its centroids; empty without any.",
    "recall_seen": "recall seen: on queries of the document that the index was built from.",
    "list_coverage": "list coverage: share of the oracle's tokens that are in the lists that were read.",
    "raised": "raised, dense: share of the queries for which the guard raised the budget, or read everything.",
}
"""What optional columns say, by a field of theirs."""
ROUNDING = 1e-6


def legend(rows: Sequence[RecallRow]) -> list[str]:
    """The lines below a table of some rows."""
    columns = [line for name, line in OPTIONAL.items() if any(getattr(row, name) is not None for row in rows)]
    return [LEGEND, *columns, *_odd(rows)]


def _odd(rows: Sequence[RecallRow]) -> list[str]:
    """A line for each figure that a reader would ask about, if a row has it."""
    bounds = [row for row in rows if methods()[row.method].is_bound]
    usable = [row for row in rows if row not in bounds]
    all_keys = [row for row in usable if methods()[row.method].reads_all_keys]
    sharing = [row for row in usable if issubclass(methods()[row.method], LayerSharing)]
    found = {
        "the best tokens of each query, known in hindsight: a bound, no method to answer with.": bounds,
        "reads nothing between sinks and tail. Nothing reads less, so it has a star whatever its error.": [
            row for row in pareto_front(usable) if row.kv_fraction == 0
        ],
        "reads every key to choose, which is half of all there is: a kv fraction above 0.5.": all_keys,
        "ranks every key by exact attention, and so chooses what the oracle does.": [
            row for row in all_keys if row.recall >= 1 - ROUNDING
        ],
        "selects more than the budget, as some of its layers attend to everything.": [
            row for row in sharing if row.selected_tokens > row.budget_tokens
        ],
    }
    return [f"{_names(of)}: {what}" for what, of in found.items() if of]


def _names(rows: Iterable[RecallRow]) -> str:
    return ", ".join(dict.fromkeys(row.method for row in rows))
