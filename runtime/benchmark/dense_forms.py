"""Implementations of dense attention, of torch and of other libraries, with which methods are compared."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.attention.flash_attention import flash_attention_3
from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.cache.buffers import Run

CUDA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

DenseForm = Callable[[torch.Tensor], torch.Tensor]
"""Function from queries [batch Hq, Q, D] to the attention output of the same shape, over one layer's keys and values,
without a mask."""


def dense_forms(data: LayerData) -> Iterator[tuple[str, DenseForm]]:
    """Yield the implementations of dense attention that support this data and device, by name.

    Torch's implementations are first. `gqa` passes grouped query heads to torch. `folded` passes a group's query heads
    as several queries of one KV head. Without a mask both give the same result, and keys and values are read once for
    all questions. On a GPU, `gqa` and `folded` are tried with each of torch's fused kernels. FlashAttention-3 follows,
    if a package of it can be imported. No memory is allocated other than by the attention itself.
    """
    backends: dict[str, SDPBackend | None] = {"": None}
    if data.keys.is_cuda:
        backends = dict(CUDA_BACKENDS)
    for name, backend in backends.items():
        for kind in ("gqa", "folded"):
            form = _attention(data, folded=kind == "folded")
            form = form if backend is None else _with_backend(form, backend)
            if _runs(partial(form, data.query)):
                yield f"sdpa {name} {kind}".replace("  ", " "), form
    flash_3 = _flash_attention_3(data) if data.keys.is_cuda else None
    if flash_3 is not None and _runs(partial(flash_3, data.query)):
        yield "FlashAttention-3", flash_3


def _flash_attention_3(data: LayerData) -> DenseForm | None:
    """Return FlashAttention-3's decode attention, or None if no package of it can be imported."""
    library = flash_attention_3()
    if library is None:
        return None
    keys, values = (rows.unflatten(0, (data.batch, -1)).transpose(1, 2) for rows in (data.keys, data.values))
    scale = data.facts.softmax_scale

    def attend(query: torch.Tensor) -> torch.Tensor:
        tokens = query.unflatten(0, (data.batch, -1)).transpose(1, 2)
        output: torch.Tensor = library.flash_attn_with_kvcache(tokens, keys, values, softmax_scale=scale)
        return output.transpose(1, 2).reshape(query.shape)

    return attend


def _attention(data: LayerData, *, folded: bool) -> DenseForm:
    keys, values = (rows.unflatten(0, (data.batch, -1)) for rows in (data.keys, data.values))
    scale = data.facts.softmax_scale

    def attend(query: torch.Tensor) -> torch.Tensor:
        heads = query.unflatten(0, (len(data.keys), -1)).flatten(1, 2) if folded else query
        apart = heads.unflatten(0, (data.batch, -1))
        output = scaled_dot_product_attention(apart, keys, values, scale=scale, enable_gqa=not folded)
        return output.reshape(query.shape)

    return attend


def _with_backend(form: DenseForm, backend: SDPBackend) -> DenseForm:
    def attend(query: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return form(query)

    return attend


def _runs(step: Run) -> bool:
    """Whether a library can run a step on this device, in this dtype."""
    try:
        with warnings.catch_warnings():
            # If the kernel is unavailable, torch also warns about each kernel that was not allowed.
            warnings.simplefilter("ignore")
            step()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True
