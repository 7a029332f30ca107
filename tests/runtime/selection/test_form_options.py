"""The options of a form choose that form again."""

import shlex
from dataclasses import fields
from typing import Any

import pytest

from sparsekv.runtime.methods.codes import Codes
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.methods.quest import Quest
from sparsekv.runtime.methods.squeezed import Squeezed
from sparsekv.runtime.selection.interface import Method, MethodSpec
from sparsekv.runtime.selection.registry import configure, form_options


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Codes(), ""),
        (Codes(replace=False, rerank=1.5), "--rerank 1.5 --no-replace"),
        (Quest(page_size=8), "--page-size 8"),
        (Squeezed(lookup="hierarchical", opened=2.0), "--lookup hierarchical --opened 2.0"),
        (Multipole(stream=True), "--stream"),
    ],
)
def test_options(method: Method, options: str) -> None:
    found = form_options(MethodSpec("some", "", method))
    assert sorted(found) == sorted(shlex.split(options))
    assert configure(type(method), _parsed(method, found)) == method


def test_a_residual_is_an_option() -> None:
    assert form_options(MethodSpec("quest", "", Quest(), residual=True)) == ["--residual"]


def _parsed(method: Method, options: list[str]) -> dict[str, Any]:
    """Values by parameter, as the command line reads them."""
    values: dict[str, Any] = {}
    for number, option in enumerate(options):
        if not option.startswith("--"):
            continue
        name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
        field = next(one for one in fields(method) if one.name == name)
        values[name] = (
            not option.startswith("--no-") if field.type is bool else type(field.default)(options[number + 1])
        )
    return values
