"""Compile a model's decode steps as `--compile` says."""

from collections.abc import Callable

from transformers import PreTrainedModel

from sparsekv.cli.common.console import note
from sparsekv.formats.errors import SparsekvError
from sparsekv.runtime.decoding.compiled import backend_for, compile_steps


def compile_or_note(
    mode: str,
    model: PreTrainedModel,
    step: Callable[[], None],
    steps: int,
    *,
    shape: tuple[int, int] = (1, 1),
    alone: bool = True,
    quiet: bool,
) -> bool:
    """Compile decode steps by running `step`, if the mode asks for it; return whether steps are compiled.

    If steps cannot be compiled, a note says so, and `step` may have ended in the middle.

    Args:
        mode: the value of `--compile`.
        steps: number of decode steps in all.
        shape: as in `compile_layers`.
        alone: whether this process is the only rank.

    Raises:
        SparsekvError: steps cannot be compiled, and the mode is `on` or there are several ranks. The other ranks would
            wait in a step that this rank cannot take.
    """
    backend = backend_for(mode, model.device, steps, shape)
    if backend is None:
        return False
    try:
        seconds = compile_steps(model, step, backend, shape=shape)
    except SparsekvError as error:
        if mode == "on" or not alone:
            raise
        note(f"not compiled: {error}", quiet=quiet)
        return False
    note(f"compiled in {seconds:.1f} s", quiet=quiet)
    return True
