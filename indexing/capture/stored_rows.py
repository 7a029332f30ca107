"""Captured rows as the files of an index store them: as they are, or in 8 bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from sparsekv.formats.context_rows import Pair, context_rows
from sparsekv.formats.int8_rows import first_tokens, joined, quantise
from sparsekv.formats.kv_storage import KVDtype, KVStorage

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TakenOver:
    """The first `tokens` rows of an index in 8 bits, by layer: they are stored as they were, because rounding them a
    second time would lose a second time. `storage` is what that index says of them."""

    tokens: int
    tensors: Callable[[int], Tensors]
    storage: KVStorage


def rows_as_stored(
    rows: Callable[[int], Pair], layer: int, kv_dtype: KVDtype | None, taken: TakenOver | None = None
) -> Pair:
    """Keys and values [Hk, N, D] of a layer as whoever reads the index's files will get them.

    Args:
        rows: returns the exact ones of a layer.
    """
    exact = rows(layer)
    return exact if kv_dtype is None else context_rows(in_8_bits(exact, layer, taken), exact[0].dtype).part(slice(None))


def in_8_bits(rows: Pair, layer: int, taken: TakenOver | None) -> dict[str, torch.Tensor]:
    """The tensors of a layer's file for exact rows [Hk, N, D], of which the first may have been taken over."""
    if taken is None:
        return quantise(*rows)
    first = first_tokens(taken.tensors(layer), taken.tokens)
    keys, values = (of[:, taken.tokens :] for of in rows)
    return joined(first, quantise(keys, values, like=first))
