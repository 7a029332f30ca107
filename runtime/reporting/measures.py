"""What is measured: a form of a method at a budget, and sums of its measures over queries."""

from dataclasses import dataclass, field, fields

import torch

from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form


@dataclass(frozen=True)
class Measured:
    """A form of a method at a budget.

    A `guard` limits the missed share of a head. Recall and `list_coverage` count the oracle's tokens at the `reference`
    budget, by default the form's own. Without `outputs` attention outputs are not computed, and output error and
    missed estimate are NaN. So many queries `together` attend to what any of them chooses.
    """

    form: Form
    budget: Budget
    guard: Guard | None = None
    reference: Budget | None = None
    outputs: bool = True
    together: int = 1


@dataclass
class Measures:
    """Sums over queries, per KV head [Hk] float64."""

    queries: int = 0
    selected_tokens: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    recall: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    attention_mass: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    output_error: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    kv_fraction: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    missed_mass: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    missed_estimate: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    list_coverage: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    raised: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    dense: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, **per_query: torch.Tensor) -> None:
        """Add values [Hk, Q] of each measure; NaN where it is not measured."""
        self.queries += next(iter(per_query.values())).shape[1]
        for name, values in per_query.items():
            setattr(self, name, getattr(self, name) + values.double().sum(1))

    def means(self) -> dict[str, torch.Tensor]:
        """Mean over queries of each measure, [Hk] on the CPU; one sync."""
        names = [one.name for one in fields(self) if one.name != "queries"]
        sums = torch.broadcast_tensors(*(getattr(self, name).to(self.recall.device) for name in names))
        means = torch.stack(sums).cpu() / self.queries
        return dict(zip(names, means, strict=True))
