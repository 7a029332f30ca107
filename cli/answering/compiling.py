"""Compile decode steps before the first question, where the answers are worth it."""

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.runtime.decoding.asker import Asker
from sparsekv.runtime.decoding.compiled import compile_steps, worth_compiling


def compile_for(asker: Asker, mode: str, together: int, tokens: int, *, quiet: bool) -> None:
    """Compile, as `--compile` says, for so many tokens of all answers, of which so many decode `together`.

    Raises:
        UsageError: the mode is `on`, and several decode together: these steps are not compiled.
        SparsekvError: the layers cannot be compiled here and the mode is `on`; in `auto` a note says so.
    """
    if together > 1 and mode == "on":
        raise UsageError("--compile on: steps of several questions are not compiled; give --batch-size 1")
    if together > 1 or not worth_compiling(mode, asker.index.model.device, tokens):
        return
    try:
        note(f"compiled in {compile_steps(asker.index, asker.cache):.1f} s", quiet=quiet)
    except SparsekvError as error:
        if mode == "on":
            raise
        note(f"not compiled: {error}", quiet=quiet)
