"""Random codes of keys and clusters, the inputs of kernels that rank keys by codes."""

from dataclasses import fields, replace
from typing import TypeVar

import torch

from sparsekv.kernels.codes.code_ranks import LaidOutCodes, WeighedClusters, lay_out_codes, spans_of
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys

from .kernel_runs import DEVICE
from .random_tensors import normal

Held = TypeVar("Held", LaidOutCodes, WeighedClusters, ExactKeys)


def small_codes(
    seed: int, m: int = 4, size: int = 4, keys: int = 4500, heads: int = 2
) -> tuple[LaidOutCodes, torch.Tensor]:
    """Return random codes, and what they stand for: keys [H, M, D] float64."""
    codes = torch.randint(0, 256, (heads, keys, m), generator=torch.Generator().manual_seed(seed))
    D = m * size
    turn, books = normal(seed, heads, D, D).half() / D**0.5, normal(seed + 1, heads, m, 256, size).half()
    named = books.double()[torch.arange(heads)[:, None, None], torch.arange(m), codes].flatten(2)
    laid_out = LaidOutCodes(turn, books, lay_out_codes(codes.byte()), keys, spans_of(books))
    return laid_out, named @ turn.double().transpose(1, 2)


def small_clusters(seed: int, keys: int, D: int, clusters: int = 70, heads: int = 2) -> WeighedClusters:
    """Return clusters of uneven sizes, some of them empty."""
    drawn = torch.rand(2, heads, keys, generator=torch.Generator().manual_seed(seed))
    labels = (drawn[0] * drawn[1] * clusters).int()
    counts = torch.stack([torch.bincount(of_head, minlength=clusters) for of_head in labels])
    bias = 0.3 * normal(seed + 1, heads, clusters)
    return WeighedClusters(normal(seed, heads, clusters, D), counts.int(), bias)


def moved(held: Held) -> Held:
    """Return the inputs on the device of the kernels."""
    each = {field.name: getattr(held, field.name) for field in fields(held)}
    return replace(held, **{name: value.to(DEVICE) for name, value in each.items() if isinstance(value, torch.Tensor)})
