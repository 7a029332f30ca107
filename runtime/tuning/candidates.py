"""The candidates of a tuning search: all forms of the methods that can run on an index."""

from dataclasses import dataclass

from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact
from sparsekv.runtime.decoding.prepare import residual_source
from sparsekv.runtime.reporting.report import forms
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.registry import methods, methods_of
from sparsekv.runtime.tuning.budget_search import BudgetSearch


@dataclass
class Candidate:
    """A form that is searched on all layers. `hopeless`: no form of its method met the target on the sample; `raised`:
    how often its target was raised."""

    form: Form
    search: BudgetSearch
    hopeless: bool
    raised: int = 0

    def propose(self) -> float | None:
        """The share to measure next; only one in all for a hopeless form."""
        return None if self.hopeless and self.search.gains else self.search.propose()


def candidates(artifact: Artifact, names: list[str], *, residual: bool) -> list[Form]:
    """Every form of the named methods; without names, of all methods that can run on the index.

    Args:
        residual: also each form with a residual, if the index has value centroids.

    Raises:
        UsageError: a method that cannot run, or that is a bound such as the oracle.
    """
    known = methods()
    for name in names:
        if name in known and known[name].is_bound:
            raise UsageError(f"--method {name}: it bounds what a choice can do and is none itself; choose another")
    chosen = [name for name in methods_of(artifact, names) if not known[name].is_bound]
    residual = residual and _has_centroids(artifact)
    return [form for name in chosen for form in forms(artifact, name, residual=residual)]


def _has_centroids(artifact: Artifact) -> bool:
    try:
        residual_source(artifact)
    except UsageError:
        return False
    return True
