"""A method with its parameters: what reports, tuning and benchmarks compare."""

from dataclasses import dataclass

from sparsekv.runtime.selection.interface import Method


@dataclass(frozen=True)
class Form:
    """A registered method with its parameters; a budget is all that a decode step needs beside it.

    `variant` names the form among those of the method, empty for its only one. With `residual`, centroids represent
    the tokens that the method does not choose.
    """

    name: str
    variant: str
    method: Method
    residual: bool = False

    @property
    def title(self) -> str:
        """Method and variant, as tables show them."""
        return f"{self.name} {self.variant}".strip()
