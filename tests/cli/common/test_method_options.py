"""Fields of methods as options: one for each name, handed to the methods that have it."""

import inspect
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import typer

from sparsekv.cli.common.method_options import with_options
from sparsekv.formats.errors import UsageError
from sparsekv.runtime.selection.registry import configure, refuse_unused


@dataclass(frozen=True)
class _First:
    levels: tuple[float, ...] = field(default=(0.5, 0.1), metadata={"help": "Shares."})
    seed: int = 0


@dataclass(frozen=True)
class _Second:
    seed: int = 3
    sort: str = field(default="a", metadata={"help": "Which."})


METHODS: dict[str, type] = {"first": _First, "second": _Second}


@dataclass(frozen=True, kw_only=True)
class _Inner:
    kind: Annotated[str, typer.Option()] = "own"
    hidden: int = 7
    parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Command:
    document: Annotated[str, typer.Argument()]
    inner: _Inner
    last: Annotated[bool, typer.Option("--last")] = False


def test_a_command_gets_one_option_a_name() -> None:
    """A field of the command without an annotation is no option."""

    @with_options(_Command, METHODS)
    def command(options: _Command) -> None: ...

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["document", "kind", "last", "levels", "seed", "sort"]
    assert all(parameters[name].default is None for name in ("levels", "seed"))
    assert set(command.__annotations__) == set(parameters)
    text = parameters["seed"].annotation.__metadata__[0].help
    assert "[default: 0 for first, 3 for second]" in text


def test_a_command_gets_its_options_as_one_object() -> None:
    got: list[_Command] = []
    app = typer.Typer()
    app.command()(with_options(_Command, METHODS)(got.append))
    app(["a.txt", "--kind", "b", "--levels", "0.2"], standalone_mode=False)
    of_methods = {"levels": "0.2", "seed": None, "sort": None}
    assert got == [_Command(document="a.txt", inner=_Inner(kind="b", parameters=of_methods))]


def test_only_what_was_given_and_is_known_reaches_a_method() -> None:
    given = {"levels": "0.2,0.05", "seed": None, "sort": "b"}
    assert configure(_First, given) == _First(levels=(0.2, 0.05))
    assert configure(_Second, given) == _Second(sort="b")


def test_text_that_is_no_list_of_numbers() -> None:
    with pytest.raises(UsageError, match=r"--levels 0.2;0.1: give numbers separated by commas, such as 0.5,0.1"):
        configure(_First, {"levels": "0.2;0.1"})


def test_an_option_that_no_chosen_method_reads() -> None:
    refuse_unused({"second": _Second}, {"levels": None, "seed": 1})
    with pytest.raises(UsageError, match=r"--levels has no effect on second"):
        refuse_unused({"second": _Second}, {"levels": "0.2", "seed": 1})
