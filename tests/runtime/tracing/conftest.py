"""The methods of an index in their forms, each answered from once."""

from collections.abc import Callable

import pytest
from support.traced import Answered, answered, every_form

from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.interface import MethodSpec, methods


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "forms" in metafunc.fixturenames:
        metafunc.parametrize("name", methods())
        metafunc.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "every"])


@pytest.fixture
def forms(full_index: OpenIndex, name: str, every: bool) -> list[MethodSpec]:
    """A method's forms, of which the plainest is the first and the last has most options: every one or these two."""
    found = [form for form in every_form(full_index).values() if form.name == name]
    return found if every or len(found) == 1 else [found[0], found[-1]]


@pytest.fixture(scope="session")
def answer_of(full_index: OpenIndex) -> Callable[[MethodSpec], Answered]:
    """A form's answer with its steps, which is given once."""
    known: dict[str, Answered] = {}

    def answer(form: MethodSpec) -> Answered:
        if form.title not in known:
            known[form.title] = answered(full_index, form)
        return known[form.title]

    return answer
