"""Fields of methods as options: one for each name, handed to the methods that have it."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest

from sparsekv.cli.common.method_options import with_method_options
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.registry import configure, refuse_unused


@dataclass(frozen=True)
class _First:
    levels: tuple[float, ...] = field(default=(0.5, 0.1), metadata={"help": "Shares."})
    seed: int = 0


@dataclass(frozen=True)
class _Second:
    seed: int = 3
    kind: str = field(default="a", metadata={"help": "Which."})


METHODS: dict[str, type] = {"first": _First, "second": _Second}


def test_a_command_gets_one_option_a_name() -> None:
    @with_method_options(METHODS)
    def command(document: str, kind: str = "own", **parameters: Any) -> None:
        """A field whose name the command has already is the command's."""

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["document", "kind", "levels", "seed"]
    assert all(parameters[name].default is None for name in ("levels", "seed"))
    assert set(command.__annotations__) >= {"levels", "seed"}
    text = parameters["seed"].annotation.__metadata__[0].help
    assert "[default: 0 for first, 3 for second]" in text


def test_only_what_was_given_and_is_known_reaches_a_method() -> None:
    given = {"levels": "0.2,0.05", "seed": None, "kind": "b"}
    assert configure(_First, given) == _First(levels=(0.2, 0.05))
    assert configure(_Second, given) == _Second(kind="b")


def test_text_that_is_no_list_of_numbers() -> None:
    with pytest.raises(UsageError, match=r"--levels 0.2;0.1: give numbers with commas, such as 0.5,0.1"):
        configure(_First, {"levels": "0.2;0.1"})


def test_an_option_that_no_chosen_method_reads() -> None:
    refuse_unused({"second": _Second}, {"levels": None, "seed": 1})
    with pytest.raises(UsageError, match=r"--levels means nothing to second"):
        refuse_unused({"second": _Second}, {"levels": "0.2", "seed": 1})
