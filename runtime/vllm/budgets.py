"""Method and budget of decode steps, as a server's settings and a request's extra arguments name them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.interface import Budget
from sparsekv.runtime.selection.registry import DENSE, methods

REQUEST = "sparsekv_budget"
"""Name of a request's budget among its extra arguments."""


@dataclass(frozen=True)
class DecodeSetting:
    """A server's method of decode steps, and the budget of requests that name none; None: these attend densely."""

    method: str
    budget: Budget | None

    @classmethod
    def parse(cls, method: Any, budget: Any) -> "DecodeSetting | None":
        """Return the setting; None without a method.

        Raises:
            UsageError: there is no such method or budget.
        """
        if method is None:
            if budget is not None:
                raise UsageError('kv_connector_extra_config: "budget" needs "method", such as "codes"')
            return None
        if not isinstance(method, str) or method not in methods():
            names = ", ".join(sorted(name for name, kind in methods().items() if kind.needs_index))
            raise UsageError(
                f'kv_connector_extra_config: no "method" {method!r}; use one of the indices\' own: {names}'
            )
        if budget is None:
            return cls(method, Budget(methods()[method].default_budget))
        return cls(method, _budget(budget, 'kv_connector_extra_config: "budget"'))


def budget_of(setting: DecodeSetting | None, arguments: Mapping[str, Any]) -> Budget | None:
    """Return the budget of a request with some extra arguments; None: it attends densely.

    Raises:
        UsageError: the request's budget is wrong, or the server has no method.
    """
    asked = arguments.get(REQUEST)
    if setting is None:
        if asked is not None:
            raise UsageError(f'{REQUEST} {asked} needs a server with "method" in its kv_connector_extra_config')
        return None
    return setting.budget if asked is None else _budget(asked, REQUEST)


def _budget(value: Any, option: str) -> Budget | None:
    return None if value == DENSE else Budget.parse(str(value), option)
