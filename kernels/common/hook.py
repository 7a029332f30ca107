"""Routing of a model's attention to a caller's function, through transformers' `AttentionInterface`.

Decoding passes the method `attend` of its cache (`IndexCache.attend` for a single sequence). A build passes an object
that records keys and queries.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from torch.overrides import wrap_torch_function

from sparsekv.kernels.common.mask import UnsupportedAttentionError, make_mask, window_of

if TYPE_CHECKING:  # transformers takes seconds to import, and commands parse their options without it
    from transformers import PreTrainedModel

IMPLEMENTATION = "sparsekv"
FOLLOWED = frozenset({"softcap", "s_aux", "is_causal"})
"""Keyword arguments of an attention call that this module reads, besides scale, mask and dropout."""
HARMLESS = frozenset(
    {
        "sliding_window",  # transformers' own attention also reads the window from the mask
        "position_ids",
        "cache_position",
        "past_key_values",
        "cache",
        "use_cache",
        "logits_to_keep",
        "num_items_in_batch",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)
"""Keyword arguments that do not change the result. Arguments that are in neither set are ignored if they are None, True
or False, and refused otherwise."""
KNOWN = FOLLOWED | HARMLESS
WAYS = {
    "indices": "chooses keys by an indexer of the model's own",
    "block_indices": "chooses keys by an indexer of the model's own",
    "position_bias": "adds a bias by position to its logits",
    "alibi": "adds a bias by position to its logits",
    "head_mask": "scales its heads by a mask",
    "sinks": "has sinks of the model's own kind",
}
"""Effects of unsupported keyword arguments on a model's attention, by argument name, as the error message states
them."""


LogitScaling = tuple[float, float | None, torch.Tensor | None]
"""Softmax scale, soft cap or None, and sink logits [Hk, G] or None."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one layer's attention call.

    `query` is [Hq, Q, D]. `keys` and `values` [Hk, T, D] are the rows that the model attends to. In most models they
    are the rows that the cache's `update` returned; some models compute them from those rows. RoPE and norms are
    already applied. If a model's queries, keys and values have different numbers of channels, the smaller are padded
    with zeros. The sequences of a batch are concatenated along the heads. A query attends to the last `window` keys up
    to its own; None: to all keys up to its own. `sink_logits` [Hq] are learned logits that have no value row; None: the
    model has none.
    """

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    softmax_scale: float
    softcap: float | None
    window: int | None
    sink_logits: torch.Tensor | None

    @property
    def grouped(self) -> torch.Tensor:
        """The query as [Hk, G, Q, D], by KV head."""
        return self.query.view(self.keys.shape[0], -1, *self.query.shape[1:])

    @property
    def scaling(self) -> LogitScaling:
        """Scale, soft cap and sinks that are applied to logits before their softmax."""
        sinks = self.sink_logits
        return self.softmax_scale, self.softcap, None if sinks is None else sinks.view(len(self.keys), -1)


AttentionFunction = Callable[[AttentionCall], torch.Tensor]


@dataclass(frozen=True)
class _Route:
    """The attention function to which a model's attention is routed, and the thread that set this route.

    The function is None within `calling_back`. The thread is stored, because context variables may be copied to other
    threads.
    """

    function: AttentionFunction | None
    thread: int


_active: ContextVar[_Route | None] = ContextVar("sparsekv_attention", default=None)
_locks: "WeakKeyDictionary[PreTrainedModel, RLock]" = WeakKeyDictionary()
_on_gpu = RLock()
_opening = RLock()
_lost = False


def has_lost_threads() -> bool:
    """Whether this process is a fork that cannot run models, because its parent's threads do not run in it.

    This is so if the parent had used a model on a CPU with several torch threads, or if another thread of the parent
    held a lock of this module at the fork.
    """
    return _lost


def _lose_threads() -> None:
    global _lost
    held = not all(map(_is_free, (_opening, _on_gpu, *_locks.values())))
    _lost = _lost or held or (bool(_locks) and torch.get_num_threads() > 1)


def _is_free(lock: RLock) -> bool:
    """Whether no other thread holds the lock."""
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


os.register_at_fork(after_in_child=_lose_threads)


@contextmanager
def alone(model: "PreTrainedModel") -> Iterator[None]:
    """Lock the model for this thread within the context; other threads wait, and this thread may enter again.

    All models on GPUs share one lock, because no thread of the process may synchronise with a GPU while another
    captures a CUDA graph.
    """
    with _locks.setdefault(model, RLock()) if model.device.type == "cpu" else _on_gpu:
        yield


@contextmanager
def all_alone() -> Iterator[None]:
    """Lock all models within the context, for changes to the whole process.

    On CPUs these are the models that `alone` has ever locked.
    """
    with ExitStack() as stack:
        for lock in (_opening, _on_gpu, *sorted(_locks.values(), key=id)):
            stack.enter_context(lock)
        yield


@contextmanager
def calling_back() -> Iterator[None]:
    """Within the context, make this thread's calls of a routed model raise RuntimeError.

    The context surrounds a callback that the user of the library passed. If the callback called the model, the call
    would get the attention of the answer in progress.
    """
    token = _active.set(_Route(None, get_ident()))
    try:
        yield
    finally:
        _active.reset(token)


def called_back() -> bool:
    """Whether this thread is within `calling_back`."""
    route = _active.get()
    return route is not None and route.function is None and route.thread == get_ident()


def is_routed() -> bool:
    """Whether this thread is within `route_attention`, and not within `calling_back`.

    A thread with copied context variables counts as the thread that they were copied from.
    """
    route = _active.get()
    return route is not None and route.function is not None


@contextmanager
def route_attention(model: "PreTrainedModel", function: AttentionFunction) -> Iterator[None]:
    """Make every attention layer of the model call `function`, which returns [Hq, Q, D], within the context.

    The function itself must mask the keys after a query, and the keys before the call's sliding window (`window`).
    Threads that route the same model wait for each other (`alone`), because the name of the attention implementation is
    set on the model.

    Within the context, the model raises RuntimeError if another thread calls it without routing it, or if a callback of
    the library's user calls it (`calling_back`).

    Raises:
        UnsupportedAttentionError: `function` cannot reproduce a layer's attention; the model's forward pass raises it
            before this layer attends.
    """
    _register()
    with alone(model):
        previous = model.config._attn_implementation
        token = _active.set(_Route(function, get_ident()))
        try:
            if previous != IMPLEMENTATION:  # unless an outer route has set it; setting it takes a millisecond
                model.set_attn_implementation(IMPLEMENTATION)
            yield
        finally:
            if previous != IMPLEMENTATION:
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
    _refuse_unfollowed(module, query, key, dropout, kwargs)
    (batch, _, tokens, _), sinks, channels = query.shape, kwargs.get("s_aux"), value.shape[-1]
    attend = _compiled_attend if torch.compiler.is_compiling() else _attend
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = equal_channels(query, key, value)
    output = attend(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        module.layer_idx,
        scaling,
        kwargs.get("softcap"),
        attention_mask,
        sinks if sinks is None or batch == 1 else sinks.repeat(batch),
    )
    if output.shape[-1] != channels:
        output = output[..., :channels]
    # Contiguous, like the output of transformers' own attention, because some models view it in another shape.
    return output.reshape(batch, -1, tokens, channels).transpose(1, 2).contiguous(), None


def equal_channels(*rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Pad tensors [..., D] with zeros to the largest D; zero channels do not change logits."""
    sizes = {each.shape[-1] for each in rows}
    if len(sizes) == 1:
        return rows
    most = max(sizes)
    return [each if each.shape[-1] == most else pad(each, (0, most - each.shape[-1])) for each in rows]


def _refuse_unfollowed(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, dropout: float, more: dict[str, Any]
) -> None:
    for name, value in more.items():
        if name not in KNOWN and not (value is None or isinstance(value, bool)):
            raise UnsupportedAttentionError(WAYS.get(name, f"depends on its argument `{name}`"))
    if dropout:
        raise UnsupportedAttentionError("drops some of its weights at random")
    causal = more.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedAttentionError("lets tokens attend to later tokens")
    if query.shape[2] > key.shape[2]:
        raise UnsupportedAttentionError("has more queries than keys")


# A torch function mode, such as the one for a model's linear layers, intercepts every torch function. With this wrapper
# it intercepts a layer's attention as one function, instead of a hundred.
@wrap_torch_function(lambda query, *_: (query,))
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    softmax_scale: float,
    softcap: float | None,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    if mask is None:
        raise UnsupportedAttentionError("has a layer without a mask")
    call = AttentionCall(int(layer), query, keys, values, softmax_scale, softcap, window_of(mask), sink_logits)
    route = _active.get()
    if route is None or route.function is None or route.thread != get_ident():
        raise RuntimeError(
            "this model is answering over an index, with sparsekv's attention instead of its own: call the "
            "model after that answer, or load it a second time"
        )
    return route.function(call)


@torch.library.custom_op("sparsekv::attend", mutates_args=())
@wraps(_attend)
def _compiled_attend(*arguments: Any) -> torch.Tensor:
    """Run `_attend` as one opaque operator for torch's compiler, which compiles only the code around it.

    The output is laid out token by token in memory, as the model reads it next. `_output_of` declares this layout.
    """
    output: torch.Tensor = _attend(*arguments)
    return output.transpose(0, 1).contiguous().transpose(0, 1)


@_compiled_attend.register_fake
def _output_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[1], query.shape[0], values.shape[-1]).transpose(0, 1)


@cache
def _register() -> None:
    """Make our attention and our masks known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, make_mask)
