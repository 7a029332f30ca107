"""The setting that a document is decoded with: a form of a method and its budgets, or dense attention."""

from dataclasses import dataclass

from sparsekv.runtime.selection.budget import Budget
from sparsekv.runtime.selection.form import Form
from sparsekv.runtime.selection.interface import Method
from sparsekv.runtime.selection.registry import DENSE


@dataclass(frozen=True)
class Setting:
    """A form of a method with its budgets, or dense attention, which has no form.

    `origin` says where they are from, where the user did not choose.
    """

    form: Form | None
    budget: Budget
    layer_budgets: dict[int, Budget] | None = None
    origin: str = ""

    @property
    def name(self) -> str:
        """The method's, or `dense`."""
        return DENSE if self.form is None else self.form.name

    @property
    def method(self) -> Method | None:
        """The method with its parameters; None for dense attention."""
        return None if self.form is None else self.form.method

    @property
    def residual(self) -> bool:
        """Whether another method's centroids stand for what is not chosen."""
        return self.form is not None and self.form.residual
