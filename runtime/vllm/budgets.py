"""Method and budget of decode steps, as a server's settings and a request's extra arguments name them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.interface import DENSE, Budget, methods

Within = Budget | Literal["default"]
"""Budget of a sparse request; "default": the method's default for the request's index."""

SETTINGS = ("indices", "method", "budget")
"""Names in kv_connector_extra_config."""
REQUEST = "sparsekv_budget"
"""Name of a request's budget among its extra arguments."""


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise UsageError if kv_connector_extra_config has a name that is not among SETTINGS, or no list of indices."""
    for name in config:
        if name not in SETTINGS:
            raise UsageError(f'kv_connector_extra_config: no setting is called "{name}"; use {", ".join(SETTINGS)}')
    names = config.get("indices")
    if not names or not isinstance(names, list):
        raise UsageError('kv_connector_extra_config needs "indices", a list of folders, such as ["manual.skv"]')


@dataclass(frozen=True)
class DecodeSetting:
    """A server's method of decode steps, and the budget of requests that name none; None: these attend densely."""

    method: str
    budget: Within | None

    def __str__(self) -> str:
        budget = "its default budget" if self.budget == "default" else self.budget or DENSE
        return f"{self.method} within {budget}"

    @classmethod
    def parse(cls, method: Any, budget: Any) -> "DecodeSetting | None":
        """Return the setting; None without a method.

        Raises:
            UsageError: there is no such method, the budget is not valid, or a budget is given without a method.
        """
        if method is None:
            if budget is not None:
                raise UsageError('kv_connector_extra_config: "budget" needs "method", such as "codes"')
            return None
        if not isinstance(method, str) or method not in methods():
            names = ", ".join(sorted(name for name, kind in methods().items() if kind.needs_index))
            raise UsageError(
                f'kv_connector_extra_config: no "method" {method!r}; use one of {names}, if the indices '
                "were built with it, or one that needs no index, such as quest"
            )
        if budget is None:
            return cls(method, "default")
        return cls(method, _budget(budget, 'kv_connector_extra_config: "budget"'))


def budget_of(setting: DecodeSetting | None, arguments: Mapping[str, Any]) -> Within | None:
    """Return the budget of a request with the extra arguments `arguments`; None: the request attends densely.

    Raises:
        UsageError: the request's budget is not valid, or is given while the server has no method.
    """
    asked = arguments.get(REQUEST)
    if setting is None:
        if asked is not None:
            raise UsageError(f'{REQUEST} {asked} needs a server with "method" in its kv_connector_extra_config')
        return None
    return setting.budget if asked is None else _budget(asked, REQUEST)


def _budget(value: Any, option: str) -> Budget | None:
    return None if value == DENSE else Budget.parse(str(value), option)
