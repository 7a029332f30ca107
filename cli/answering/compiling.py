"""Compile decode steps before the first question, where the answers are worth it."""

from functools import partial

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.decoding.asker import Asker
from sparsekv.runtime.decoding.batch import Batch
from sparsekv.runtime.decoding.compiled import compile_steps, worth_compiling
from sparsekv.runtime.decoding.step import one_step


def compile_for(asker: Asker, batch: Batch | None, mode: str, tokens: int, *, alone: bool, quiet: bool) -> None:
    """Compile, as `--compile` says, for the steps that so many tokens of all answers take; `batch` decodes them, if
    several do together.

    Args:
        alone: no other rank takes these steps too.

    Raises:
        SparsekvError: the layers cannot be compiled here, and the mode is `on`, or other ranks wait in the step that
            this one cannot take; else a note says so.
    """
    model, slots = asker.index.model, 1 if batch is None else batch.slots
    if not worth_compiling(mode, model.device, tokens // slots):
        return
    try:
        if batch is None:
            seconds = compile_steps(model, partial(one_step, model, asker.cache, asker.index.input_ids[-1:]))
        else:
            seconds = compile_steps(model, batch.one_step, tokens=batch.shared.size_of(slots))
        note(f"compiled in {seconds:.1f} s", quiet=quiet)
    except SparsekvError as error:
        if mode == "on" or not alone:
            raise
        note(f"not compiled: {error}", quiet=quiet)
