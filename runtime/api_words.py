"""Errors of the Python API in its own words: arguments where the command line has options."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from sparsekv.formats.errors import UsageError
from sparsekv.formats.suggestions import suggestion
from sparsekv.runtime.decoding.generate import Sampling
from sparsekv.runtime.selection.registry import methods

_OPTION = re.compile(r"--([a-z][a-z-]*)")


@contextmanager
def api_words() -> Iterator[None]:
    """Within it a UsageError names arguments, `page_size` for `--page-size`; shown commands stay as they are."""
    try:
        yield
    except UsageError as error:
        parts = str(error).split("`")
        parts[::2] = [_OPTION.sub(lambda found: found[1].replace("-", "_"), part) for part in parts[::2]]
        raise UsageError("`".join(parts)) from None


def refuse_unknown(given: Iterable[str], own: Iterable[str]) -> None:
    """Raise UsageError for the name of an argument that no method has, nor the call itself, whose are `own`."""
    known = [*own, *dict.fromkeys(field.name for method in methods().values() for field in fields(method))]
    for name in given:
        if name not in known:
            meant = suggestion(name, [*known, *(field.name for field in fields(Sampling))])
            raise UsageError(f"{name} is no argument{meant}; name it as in docs/how-to/python.md, or leave it out")
