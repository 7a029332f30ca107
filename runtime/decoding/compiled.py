"""Compiled decode steps: torch's compiler takes a model's layers, all of them but the attention.

To the compiler our attention is one operator (`sparsekv::attend`), and a model's layers are one piece of code, so that
it compiles a layer and not a model.
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils.hooks import RemovableHandle

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.user.cache import cache_root

if TYPE_CHECKING:  # the options of `generate` are read from here, and its --help needs no transformers
    from transformers import PreTrainedModel

MODES = ("auto", "on", "off")
WORTH_IT = 4096
"""How many steps make `auto` compile on a GPU: one of an 8B becomes 2.6 ms shorter, and compiling, or reading what was
compiled, takes some ten seconds."""

_COMPILED = WeakSet["PreTrainedModel"]()


def is_compiled(model: "PreTrainedModel") -> bool:
    """Whether some of the model's steps are given to torch's compiler."""
    return model in _COMPILED


def worth_compiling(mode: str, device: torch.device, steps: int) -> bool:
    """Whether to compile for so many steps of all answers together."""
    return mode == "on" or (mode == "auto" and device.type == "cuda" and steps >= WORTH_IT)


def compile_layers(model: "PreTrainedModel", backend: str = "inductor", *, tokens: int = 1) -> RemovableHandle:
    """From now on compile the model's layers where it gets so many `tokens` a row; with others they run as they are.

    The first such step compiles. What was compiled is kept in the user's cache, for other processes.

    Args:
        tokens: 1 in a sequence's decode step; where sequences share a document their tokens are one row.

    Returns:
        a handle: after its `remove` whatever the last call of the model was decides.
    """
    _name_caches()
    # Layers differ by their number alone, which the compiler would otherwise take for a constant of the code.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    _COMPILED.add(model)
    names = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(backend=backend)

    def choose(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        torch.compiler.set_stance("default" if ids is not None and ids.shape[1] == tokens else "force_eager")

    return model.register_forward_pre_hook(choose, with_kwargs=True)


def _name_caches() -> None:
    """Say where the compiler keeps what it has compiled, and where Triton does, as long as nobody else has.

    The compiler would name another folder for Triton in the middle of a process, where the kernels that an earlier
    process has compiled are not found.
    """
    import triton  # here, because the options of `generate` are read from this file

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


def compile_steps(model: "PreTrainedModel", step: Callable[[], None], *, tokens: int = 1) -> float:
    """Compile decode steps of so many `tokens` a row, by taking one; returns the seconds.

    Raises:
        SparsekvError: they cannot be compiled here, for want of a C++ compiler for example; the model runs as it is.
    """
    started = time.perf_counter()
    hook = compile_layers(model, tokens=tokens)
    try:
        step()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        hook.remove()
        _COMPILED.discard(model)
        torch.compiler.set_stance("force_eager")
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SparsekvError(f"the model's layers cannot be compiled here: {reason}; use --compile off") from error
    return time.perf_counter() - started
