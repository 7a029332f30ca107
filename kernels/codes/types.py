"""Product codes of keys, in the layouts that kernels read, and the clusters that represent tokens not chosen."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn.functional import pad

from sparsekv.kernels.common.launch import aligned
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS
from sparsekv.kernels.posting_lists.types import TokenRanks

CENTROIDS = 256  # centroids of a part, one for each value of a byte
IN_WORD = 4  # codes in an int32 word
# A query-centroid product is stored as a byte: its distance below the part's largest product, in steps. Each query head
# has a step of its own, such that LEVELS steps are at least the largest distance. A clamped distance would make keys
# look better than they are: keys with a bias have products that are hundreds of octaves (units of log 2) apart. The
# error of rounding to a step is smaller than the error of the key's code.
LEVELS = 255
LEAST_OCTAVES = 1.0  # lower bound of LEVELS steps, because all products of a query head can be equal
STEP_ROOM = 1.02  # factor of a step for the error of its bound, which is computed from truncated float32 numbers
# Octaves above probability 1 / `wanted` in which ranks still distinguish keys. Without them too many keys could share
# the highest rank, because the total of the softmax is only estimated. The estimate is too small where few keys have
# most of the probability.
HEADROOM = 6


@dataclass(frozen=True)
class ProductCodes(ABC):
    """Product codes of `keys` keys of each of H heads.

    `turn` [H, D, D] is the matrix by which queries are multiplied; the products are called turned queries. The channels
    of a turned query are split into m parts. `books` [H, m, 256, D / m] are the centroids of each part. Both tensors
    are contiguous. `words` [H, m / 4, keys or more] int32 holds the codes. Byte b of a key's word p is the key's code
    in part 4 p + b: the index of a centroid. Each subclass defines the order of the keys in `words`.
    """

    turn: torch.Tensor
    books: torch.Tensor
    words: torch.Tensor
    keys: int

    def repeated(self, each: int) -> Self:
        """Repeat each head `each` times."""
        turn, books, words = (one.repeat_interleave(each, 0) for one in (self.turn, self.books, self.words))
        return replace(self, turn=turn, books=books, words=words)

    @abstractmethod
    def in_order(self) -> torch.Tensor:
        """Return the words in the order of the keys."""

    def unpacked(self) -> torch.Tensor:
        """Unpack the words to codes [H, M, m] int64."""
        words = self.in_order()[..., : self.keys, None]
        by_byte = (words >> (8 * torch.arange(IN_WORD, device=words.device))) & 255
        codes: torch.Tensor = by_byte.transpose(2, 3).flatten(1, 2).transpose(1, 2).long()
        return codes


@dataclass(frozen=True)
class KeyCodes(ProductCodes):
    """Product codes whose words are in the order of the keys, with any strides."""

    def in_order(self) -> torch.Tensor:
        return self.words


@dataclass(frozen=True)
class LaidOutCodes(ProductCodes):
    """Product codes in the layout that the scan kernel reads: contiguous words in tiles of 4,096 keys.

    Within every 32 keys, the word of key 8 j + w is at index 4 w + j. Therefore the keys whose ranks share a word of
    `TokenRanks` are adjacent. `spans` [H, m, D / m] float32 are those of the codebooks (`spans_of`).
    """

    spans: torch.Tensor

    def repeated(self, each: int) -> Self:
        return replace(super().repeated(each), spans=self.spans.repeat_interleave(each, 0))

    def in_order(self) -> torch.Tensor:
        words: torch.Tensor = self.words.unflatten(2, (-1, 8, 4)).transpose(3, 4).flatten(2)
        return words


def spans_of(books: torch.Tensor) -> torch.Tensor:
    """Compute each channel's largest minus smallest component of centroids [H, m, C, D / m]: [H, m, D / m] float32."""
    return (books.amax(2) - books.amin(2)).float().contiguous()


def as_stored(codes: torch.Tensor) -> torch.Tensor:
    """View contiguous codes [H, M, m] uint8, with m a multiple of four, as `KeyCodes.words`."""
    return codes.view(torch.int32).transpose(1, 2)


def lay_out_codes(codes: torch.Tensor) -> torch.Tensor:
    """Convert codes [H, M, m] uint8, with m a multiple of four, to `LaidOutCodes.words`; zeros past the last key."""
    padded = pad(codes, (0, 0, 0, -codes.shape[1] % TILE_TOKENS))
    of_32 = padded.view(torch.int32).transpose(1, 2).unflatten(2, (-1, 4, 8))
    words: torch.Tensor = of_32.transpose(3, 4).flatten(2).contiguous()
    return words


@dataclass(frozen=True)
class WeighedClusters:
    """C clusters of each of H heads; every key belongs to one cluster.

    `keys` [H, C, D] are the clusters' mean keys, `counts` [H, C] int32 their numbers of keys. `bias` [H, C] float32 is
    added to the log of the count. All are contiguous within a head; heads may have any stride.
    """

    keys: torch.Tensor
    counts: torch.Tensor
    bias: torch.Tensor

    def repeated(self, each: int) -> "WeighedClusters":
        """Repeat each head `each` times."""
        return WeighedClusters(*(one.repeat_interleave(each, 0) for one in (self.keys, self.counts, self.bias)))


@dataclass(frozen=True)
class CodeRanks:
    """Ranks of all keys by their codes, with the logits of the clusters.

    `logits` [H, G, C or more] float32 is minus infinity for empty clusters and past the last. `taken` [H, C] int32 is
    for `KeyGroups.taken`: it begins as zero, and a choice of keys adds the number of each cluster's chosen keys to it.
    """

    ranks: TokenRanks
    logits: torch.Tensor
    taken: torch.Tensor


@dataclass(frozen=True)
class JoinedKeys:
    """Union of the keys that several queries chose.

    `rows` [H, capacity] int32 are the keys' indices in ascending order. The first `used` [H] int32 are valid.
    """

    rows: torch.Tensor
    used: torch.Tensor


def padded_clusters(tensor: torch.Tensor) -> torch.Tensor:
    """Pad [..., C] with minus infinity to a multiple of 16, so that attention can read four elements at a time."""
    size = tensor.shape[-1]
    return pad(tensor, (0, aligned(size) - size), value=-torch.inf)
