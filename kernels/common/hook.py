"""Routes a model's attention to a given function, through transformers' `AttentionInterface`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import wrap_torch_function
from transformers import AttentionInterface, PreTrainedModel

IMPLEMENTATION = "sparsekv"


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one layer's attention call.

    query [Hq, Q, D]; keys and values [Hk, T, D] as the cache's `update` returned them; all after RoPE and norms. The
    sequences of a batch are concatenated along the heads.
    """

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    softmax_scale: float
    softcap: float | None
    window: int | None
    sink_logits: torch.Tensor | None


AttentionFunction = Callable[[AttentionCall], torch.Tensor]


@dataclass(frozen=True)
class _Route:
    """The attention function of a model, None within a caller's callback, and the thread that set it: a context may be
    copied to other threads."""

    function: AttentionFunction | None
    thread: int


_active: ContextVar[_Route | None] = ContextVar("sparsekv_attention", default=None)
_locks: WeakKeyDictionary[PreTrainedModel, RLock] = WeakKeyDictionary()
_on_gpu = RLock()
_opening = RLock()


@contextmanager
def alone(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, other threads that want the model wait; this one may enter it again.

    Models on GPUs share one lock: a step that is captured forbids every thread of the process to wait for a GPU.
    """
    with _locks.setdefault(model, RLock()) if model.device.type == "cpu" else _on_gpu:
        yield


@contextmanager
def all_alone() -> Iterator[None]:
    """Within the context, other threads that want any model wait: for changes of the whole process."""
    with ExitStack() as stack:
        for lock in (_opening, _on_gpu, *sorted(_locks.values(), key=id)):
            stack.enter_context(lock)
        yield


@contextmanager
def calling_back() -> Iterator[None]:
    """Within the context, this thread's calls of a routed model are refused: for functions that a caller gave."""
    token = _active.set(_Route(None, get_ident()))
    try:
        yield
    finally:
        _active.reset(token)


def called_back() -> bool:
    """Whether this thread is within `calling_back`."""
    route = _active.get()
    return route is not None and route.function is None and route.thread == get_ident()


@contextmanager
def route_attention(model: PreTrainedModel, function: AttentionFunction) -> Iterator[None]:
    """Within the context, every attention layer of the model calls `function`, which returns [Hq, Q, D].

    transformers makes no mask: the function itself has to mask what a query may not see. Threads that have one model
    wait for each other, since the choice of the function is the model's.
    """
    with alone(model):
        previous = model.config._attn_implementation
        token = _active.set(_Route(function, get_ident()))
        try:
            model.set_attn_implementation(IMPLEMENTATION)
            yield
        finally:
            model.set_attn_implementation(previous)
            _active.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    batch, sinks = len(query), kwargs.get("s_aux")
    attend = _compiled_attend if torch.compiler.is_compiling() else _attend
    output = attend(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        module.layer_idx,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        kwargs.get("softcap"),
        kwargs.get("sliding_window"),
        sinks if sinks is None or batch == 1 else sinks.repeat(batch),
    )
    return output.unflatten(0, (batch, -1)).transpose(1, 2), None


# To a mode that looks at torch's functions, as one for a model's linear layers does, all of a layer's attention is one
# function: it need not look at each of a hundred.
@wrap_torch_function(lambda query, *_: (query,))
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    call = AttentionCall(int(layer), query, keys, values, softmax_scale, softcap, window, sink_logits)
    route = _active.get()
    if route is None or route.function is None or route.thread != get_ident():
        raise RuntimeError(
            "this model answers over an index just now, with attention that is not its own: call it when that answer "
            "has come back, or load the model once more"
        )
    return route.function(call)


@torch.library.custom_op("sparsekv::attend", mutates_args=())
def _compiled_attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    softmax_scale: float,
    softcap: float | None,
    window: int | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """The same as one operator to torch's compiler, which compiles what is around it and need not look into it.

    It is told how the output lies in memory: token by token, as the model wants it next.
    """
    output = _attend(query, keys, values, layer, softmax_scale, softcap, window, sink_logits)
    return output.transpose(0, 1).contiguous().transpose(0, 1)


@_compiled_attend.register_fake
def _output_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[1], query.shape[0], values.shape[-1]).transpose(0, 1)


AttentionInterface.register(IMPLEMENTATION, _attention)
