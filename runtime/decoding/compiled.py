"""Compile decode steps: torch.compile compiles a model's layers, except their attention.

To the compiler, this project's attention is one opaque operator (`sparsekv::attend`). All layers of a model run the
same code, so the compiler compiles one layer and not the whole model.
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

if TYPE_CHECKING:  # the command line reads options from this module, and --help must not import transformers
    from torch.fx import GraphModule
    from transformers import PreTrainedModel

MODES = ("auto", "on", "off")
WORTH_JOINING = 2048
"""Minimum number of steps for which `auto` compiles on a GPU those layers that need only this project's kernels.

Compiling them takes five seconds on a machine that imports slowly, and less on others. It makes a step of an 8B model
3.9 ms shorter, and of a 0.5B model 2.9 ms.
"""
WORTH_COMPILING = 4096
"""Minimum number of steps for which `auto` compiles on a GPU with kernels that torch's compiler makes.

Compiling then takes seven to fourteen seconds.
"""

_COMPILED = WeakSet["PreTrainedModel"]()


def is_compiled(model: "PreTrainedModel") -> bool:
    """Whether torch.compile has compiled some of the model's steps."""
    return model in _COMPILED


def backend_for(mode: str, device: torch.device, steps: int, shape: tuple[int, int] = (1, 1)) -> str | None:
    """Return the backend with which to compile decode steps. None: they are not compiled.

    The backend is `inductor` if the mode is `on`, or if it is `auto` and there are at least WORTH_COMPILING steps on a
    GPU. It is `eager` for at least WORTH_JOINING steps of one token: layers that need other kernels than this project's
    run as they are.

    Args:
        steps: number of decode steps in all.
        shape: as in `compile_layers`.
    """
    if mode == "on" or (mode == "auto" and device.type == "cuda" and steps >= WORTH_COMPILING):
        return "inductor"
    joined = mode == "auto" and device.type == "cuda" and steps >= WORTH_JOINING and shape == (1, 1)
    return "eager" if joined else None


def compile_layers(
    model: "PreTrainedModel", backend: str = "inductor", *, shape: tuple[int, int] = (1, 1)
) -> RemovableHandle:
    """From now on run the model's layers compiled in calls with `input_ids` of this shape, and eagerly in other calls.

    The first call with this shape compiles. Compiled code is stored in the user's cache folder, for other processes.

    Args:
        backend: name of the backend of torch.compile for layers that need other kernels than this project's.
        shape: number of rows and of tokens per row, as `SequenceCache.step_shape`; by default those of the decode step
            of one sequence.

    Returns:
        The handle of the hook that switches between compiled and eager calls. After the handle's `remove`, all calls
        are compiled or eager, as the last call was.
    """
    # imported here, because `sparsekv generate --help` imports this file and needs no compiler
    from torch._dynamo.backends.registry import lookup_backend

    from sparsekv.runtime.decoding.joined_linears import joined_or

    _name_caches()
    # Layers differ only in their number. By default the compiler would treat the number as a constant and compile each
    # layer.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    _COMPILED.add(model)
    compiler = joined_or(_inductor if backend == "inductor" else lookup_backend(backend))
    names = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(backend=compiler)

    def choose(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        torch.compiler.set_stance("default" if ids is not None and ids.shape == shape else "force_eager")

    return model.register_forward_pre_hook(choose, with_kwargs=True)


def _inductor(graph: "GraphModule", inputs: list[Any]) -> Callable[..., Any]:
    """Backend of torch's own compiler, which joins those products that it can join."""
    from torch._inductor.compile_fx import compile_fx

    from sparsekv.runtime.decoding.joined_linears import JoinLinears

    compiled: Callable[..., Any] = compile_fx(
        graph, inputs, config_patches={"post_grad_custom_pre_pass": JoinLinears()}
    )
    return compiled


def _name_caches() -> None:
    """Set the cache folders of torch.compile and of Triton in the environment, unless they are already set.

    Otherwise torch.compile would change Triton's cache folder in the middle of a process. Triton would then not find
    the kernels that an earlier process compiled.
    """
    import triton  # imported here, because `sparsekv generate --help` imports this file and needs no Triton

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


def compile_steps(
    model: "PreTrainedModel", step: Callable[[], None], backend: str = "inductor", *, shape: tuple[int, int] = (1, 1)
) -> float:
    """Compile decode steps by running `step` once; return the seconds of this run.

    Args:
        backend: as in `compile_layers`.
        shape: as in `compile_layers`.

    Raises:
        SparsekvError: steps cannot be compiled here, for example without a C++ compiler; the model then runs eagerly.
        torch.OutOfMemoryError: memory runs out.
    """
    started = time.perf_counter()
    hook = compile_layers(model, backend, shape=shape)
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
