"""Dense attention by torch's own kernels: its strongest form on this machine is what all else is compared with."""

import warnings
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.runtime.benchmark.layer import LayerData, Step

CUDA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def dense_steps(data: LayerData) -> Iterator[tuple[str, Step]]:
    """Forms of one step of dense attention, by name, that torch can run here.

    `gqa` leaves the groups to torch; `folded` has the query heads of a group as so many queries of their KV head, which
    without a mask is the same. On a GPU each is tried with each of torch's fused kernels. Allocates nothing beside what
    torch does.
    """
    backends: dict[str, SDPBackend | None] = {"": None}
    if data.keys.is_cuda:
        backends = dict(CUDA_BACKENDS)
    for name, backend in backends.items():
        for form, step in (("gqa", _grouped(data)), ("folded", _folded(data))):
            step = step if backend is None else _with_backend(step, backend)
            if _runs(step):
                yield f"sdpa {name} {form}".replace("  ", " "), step


def _by_sequence(rows: torch.Tensor, batch: int) -> torch.Tensor:
    apart: torch.Tensor = rows.unflatten(0, (batch, -1))
    return apart


def _grouped(data: LayerData) -> Step:
    keys, values = _by_sequence(data.keys, data.batch), _by_sequence(data.values, data.batch)
    query, scale = _by_sequence(data.query, data.batch), data.facts.softmax_scale
    return lambda: scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True).flatten(0, 1)


def _folded(data: LayerData) -> Step:
    keys, values = _by_sequence(data.keys, data.batch), _by_sequence(data.values, data.batch)
    query = _by_sequence(data.query.unflatten(0, (len(data.keys), -1))[:, :, 0], data.batch)
    scale = data.facts.softmax_scale
    return lambda: scaled_dot_product_attention(query, keys, values, scale=scale).flatten(0, 2)[:, None]


def _with_backend(step: Step, backend: SDPBackend) -> Step:
    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return step()

    return run


def _runs(step: Step) -> bool:
    """Whether torch has this form for these tensors."""
    try:
        with warnings.catch_warnings():
            # Of a kernel that is not there torch also tells why each other one was not tried.
            warnings.simplefilter("ignore")
            step()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    return True
