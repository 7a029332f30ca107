"""Dense attention by torch's own kernels: the fastest form on this machine is the baseline of all comparisons."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.runtime.benchmark.layer import LayerData
from sparsekv.runtime.cache.graphs import Step

CUDA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


DenseForm = Callable[[torch.Tensor], torch.Tensor]
"""Attention of queries [batch Hq, Q, D] to one layer's keys and values, without a mask; returns the same shape."""


def dense_steps(data: LayerData) -> Iterator[tuple[str, Step]]:
    """The forms of dense attention that torch can run here, by name, as steps with the layer's own query."""
    for name, form in dense_forms(data):
        yield name, partial(form, data.query)


def dense_forms(data: LayerData) -> Iterator[tuple[str, DenseForm]]:
    """The forms of one step of dense attention that torch can run here, by name.

    `gqa` passes grouped heads to torch; `folded` passes a group's query heads as several queries of one KV head, which
    is the same without a mask, and reads keys and values once for all questions. On a GPU each is tried with each of
    torch's fused kernels. Allocates only what torch does.
    """
    backends: dict[str, SDPBackend | None] = {"": None}
    if data.keys.is_cuda:
        backends = dict(CUDA_BACKENDS)
    for name, backend in backends.items():
        for kind, form in (("gqa", _grouped(data)), ("folded", _folded(data))):
            form = form if backend is None else _with_backend(form, backend)
            if _runs(partial(form, data.query)):
                yield f"sdpa {name} {kind}".replace("  ", " "), form


def _by_sequence(rows: torch.Tensor, batch: int) -> torch.Tensor:
    apart: torch.Tensor = rows.unflatten(0, (batch, -1))
    return apart


def _grouped(data: LayerData) -> DenseForm:
    keys, values = _by_sequence(data.keys, data.batch), _by_sequence(data.values, data.batch)
    scale = data.facts.softmax_scale

    def attend(query: torch.Tensor) -> torch.Tensor:
        apart = _by_sequence(query, data.batch)
        return scaled_dot_product_attention(apart, keys, values, scale=scale, enable_gqa=True).flatten(0, 1)

    return attend


def _folded(data: LayerData) -> DenseForm:
    keys, values = _by_sequence(data.keys, data.batch), _by_sequence(data.values, data.batch)
    scale = data.facts.softmax_scale

    def attend(query: torch.Tensor) -> torch.Tensor:
        grouped = query.unflatten(0, (len(data.keys), -1))
        apart = _by_sequence(grouped.flatten(1, 2), data.batch)
        return scaled_dot_product_attention(apart, keys, values, scale=scale).reshape(grouped.shape).flatten(0, 1)

    return attend


def _with_backend(form: DenseForm, backend: SDPBackend) -> DenseForm:
    def attend(query: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return form(query)

    return attend


def _runs(step: Step) -> bool:
    """Whether torch can run this form with these tensors."""
    try:
        with warnings.catch_warnings():
            # When a kernel is unavailable, torch also warns about every other one that was not tried.
            warnings.simplefilter("ignore")
            step()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True
