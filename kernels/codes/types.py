"""Product codes of keys as a scan reads them, and the clusters that stand for the tokens that are not chosen."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn.functional import pad

from sparsekv.kernels.common.launch import aligned
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS
from sparsekv.kernels.posting_lists.types import TokenRanks

CENTROIDS = 256  # of a part: the values of a byte
IN_WORD = 4  # codes of a word
# A product with a centroid is rounded to a byte: how far below the part's best one it is, in steps of a tenth of an
# octave. That is less than what the code of a key loses of it. Products further below are as if they were at the end.
LEVELS = 255
PER_OCTAVE = LEVELS / 24
HEADROOM = 4  # octaves above what a key of `wanted` equal ones would have, within which joint ranks differ


@dataclass(frozen=True)
class ProductCodes(ABC):
    """Codes of `keys` keys of each of H heads.

    turn [H, D, D], by which queries are multiplied; books [H, m, 256, D / m], the centroids of m parts of the turned
    channels; both contiguous. words [H, m / 4, keys or more] int32, in an order of each class's own: byte b of a key's
    word p is its code in part 4 p + b.
    """

    turn: torch.Tensor
    books: torch.Tensor
    words: torch.Tensor
    keys: int

    def repeated(self, each: int) -> Self:
        """Those of each head so many times."""
        turn, books, words = (one.repeat_interleave(each, 0) for one in (self.turn, self.books, self.words))
        return replace(self, turn=turn, books=books, words=words)

    @abstractmethod
    def in_order(self) -> torch.Tensor:
        """Words in the order of the keys."""

    def unpacked(self) -> torch.Tensor:
        """Codes [H, M, m] int64."""
        words = self.in_order()[..., : self.keys, None]
        by_byte = (words >> (8 * torch.arange(IN_WORD, device=words.device))) & 255
        codes: torch.Tensor = by_byte.transpose(2, 3).flatten(1, 2).transpose(1, 2).long()
        return codes


@dataclass(frozen=True)
class KeyCodes(ProductCodes):
    """Words in the order of the keys, with any strides."""

    def in_order(self) -> torch.Tensor:
        return self.words


@dataclass(frozen=True)
class LaidOutCodes(ProductCodes):
    """Words to be looked up, contiguous, in tiles of 4,096 keys: of 32 keys the word of key 8 j + w is at 4 w + j, so
    that those whose ranks are in one word of `TokenRanks` lie beside each other."""

    def in_order(self) -> torch.Tensor:
        words: torch.Tensor = self.words.unflatten(2, (-1, 8, 4)).transpose(3, 4).flatten(2)
        return words


def as_stored(codes: torch.Tensor) -> torch.Tensor:
    """`KeyCodes.words` of contiguous codes [H, M, m] uint8, with m a multiple of four; a view."""
    return codes.view(torch.int32).transpose(1, 2)


def lay_out(codes: torch.Tensor) -> torch.Tensor:
    """`LaidOutCodes.words` of codes [H, M, m] uint8, with m a multiple of four; zeros past the last key."""
    padded = pad(codes, (0, 0, 0, -codes.shape[1] % TILE_TOKENS))
    of_32 = padded.view(torch.int32).transpose(1, 2).unflatten(2, (-1, 4, 8))
    words: torch.Tensor = of_32.transpose(3, 4).flatten(2).contiguous()
    return words


@dataclass(frozen=True)
class WeighedClusters:
    """C clusters of each of H heads, in which every key is in one: keys [H, C, D]; counts [H, C] int32, of keys; and
    bias [H, C] float32, added to the logarithm of a count. A head's rows are contiguous, heads need not be."""

    keys: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor

    def repeated(self, each: int) -> "WeighedClusters":
        """Those of each head so many times."""
        return WeighedClusters(*(one.repeat_interleave(each, 0) for one in (self.keys, self.counts, self.bias)))


@dataclass(frozen=True)
class CodeRanks:
    """Ranks of all keys by their codes; the clusters' logits [H, G, C or more] float32, minus infinity for empty ones
    and past the last; and taken [H, C] int32 zeros, for `KeyGroups`."""

    ranks: TokenRanks
    logits: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class JoinedKeys:
    """Keys that any of several queries chose: rows [H, capacity] int32 in the order of the keys, of which the first
    used [H] int32 are valid."""

    rows: torch.Tensor
    used: torch.Tensor


def padded_clusters(tensor: torch.Tensor) -> torch.Tensor:
    """[..., C] padded with minus infinity to a multiple of 16, which attention reads four at a time."""
    size = tensor.shape[-1]
    return pad(tensor, (0, aligned(size) - size), value=-torch.inf)
