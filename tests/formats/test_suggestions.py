"""Tests of the suggestion of the nearest name for a misspelt one."""

import pytest

from sparsekv.formats.errors import suggestion

METHODS = ["codes", "multipole", "tidaldecode", "window", "quest"]


@pytest.mark.parametrize(
    ("given", "meant"), [("code", "codes"), ("multipool", "multipole"), ("Quest", "quest"), ("tidal", "tidaldecode")]
)
def test_the_nearest_name_is_suggested(given: str, meant: str) -> None:
    assert suggestion(given, METHODS) == f" (did you mean {meant}?)"


def test_what_is_like_none_has_no_suggestion() -> None:
    assert suggestion("xyz", METHODS) == ""
