"""Types that kernels read: int8 rows with their scales, chosen rows, and centroids with their logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from sparsekv.kernels.common.launch import power_of_two


@dataclass(frozen=True)
class RowScales:
    """Scales of int8 keys and values.

    A key is its int8 number times its row's scale times its channel's scale, plus its channel's offset. A value is its
    int8 number times its row's scale.

    `rows` [H, M, 2] bfloat16 holds each row's key scale and value scale. They are adjacent, because a kernel can
    prefetch four bytes but not two. `channels` and `offsets` are [H, D]. All are contiguous within a head. `units` [H]
    float32 is the mean value scale of each head. Kernels divide value scales by it, so that they fit in float16, whose
    largest number is 65,504.
    """

    rows: torch.Tensor
    channels: torch.Tensor
    offsets: torch.Tensor
    units: torch.Tensor

    def words(self) -> torch.Tensor:
        """View the two bfloat16 scales of each row as one int32, [H, M]."""
        return self.rows.view(torch.int32)[..., 0]


@dataclass(frozen=True)
class Int8Kernel:
    """Keys and values [H, M, D] int8, contiguous within a head, and their scales."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: RowScales

    def restored(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantise the keys and values to `dtype`."""
        of_keys, of_values = self.scales.rows.to(dtype).split(1, 2)
        channels, offsets = (one[:, None].to(dtype) for one in (self.scales.channels, self.scales.offsets))
        return self.keys.to(dtype) * of_keys * channels + offsets, self.values.to(dtype) * of_values

    def in_words(self) -> "Int8Kernel":
        """View the tensors in the layout that kernels read.

        Two adjacent channels are one int16, [H, M, D / 2]. The two scales of a row are one int32, [H, M]. D must be
        even, which it is in every model with RoPE.
        """
        scales = replace(self.scales, rows=self.scales.words())
        return Int8Kernel(self.keys.view(torch.int16), self.values.view(torch.int16), scales)


Keys: TypeAlias = torch.Tensor | Int8Kernel
"""Keys [H, M, D], either float or int8; the values of an `Int8Kernel` are ignored."""


def pair_block(channels: int) -> int:
    """Return the width, in channels, of a block for a row of channel pairs; a product needs at least 16 pairs."""
    return max(power_of_two(channels), 32)


@dataclass(frozen=True)
class RunRows:
    """Chosen rows of keys and values [H, M, D], given as runs of neighbouring rows or as single rows.

    On a GPU, keys and values have equal strides. For runs, `starts` [H, R] int holds their first rows. `ends` [H, R]
    int32 holds the running sums of their lengths, which are at most `capacity`. For single rows, `starts` holds the row
    indices and `ends` is None. The first `used` [H] int32 indices are valid, or the first `capacity` if `used` is None.

    `queue` [H] int32 is a counter for the GPU kernel, zero before the call and new for each call. Programs that finish
    their share of a head's rows early take further rows of the head, and add them to the counter. If `queue` is None,
    all rows are in fixed shares. With `scales`, keys and values are int8, and the scales convert them to real values.
    """

    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor | None
    capacity: int
    used: torch.Tensor | None = None
    queue: torch.Tensor | None = None
    scales: RowScales | None = None

    def gathered(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the keys and values [H, R, D] of rows [H, R] int64; int8 rows are dequantised to `dtype`."""
        places = rows[..., None].expand(-1, -1, self.keys.shape[2])
        keys, values = self.keys.gather(1, places), self.values.gather(1, places)
        if self.scales is None:
            return keys, values
        of_rows = self.scales.rows.gather(1, rows[..., None].expand(-1, -1, 2))
        return Int8Kernel(keys, values, replace(self.scales, rows=of_rows)).restored(dtype)


@dataclass(frozen=True)
class Centroids:
    """Centroids that are attended instead of the rows that they represent.

    Keys and values [H, C, D] have any float dtype. `log_counts` [H, C or more] float32 is the log of the number of
    rows that each centroid represents.
    """

    keys: torch.Tensor
    values: torch.Tensor
    log_counts: torch.Tensor


@dataclass(frozen=True)
class TakenRows:
    """Row counts of C clusters of each of H heads, some of whose rows are attended individually.

    `counts` [H, C] int32 counts all rows of each cluster; the counts of one head are contiguous. `taken` [H, C] int32
    counts the rows that are attended individually, and is contiguous.
    """

    counts: torch.Tensor
    taken: torch.Tensor

    def log_left(self) -> torch.Tensor:
        """Compute the log [H, C] of the number of remaining rows; minus infinity if none remain."""
        return (self.counts - self.taken).log()


@dataclass(frozen=True)
class ScoredCentroids:
    """Centroids that are attended instead of the rows that they represent, with the query's logits.

    `logits` [H, G, C or more] float32 are the query's products with the centroids' keys, scaled and soft-capped.
    `log_counts` is [H, C or more] float32 and `values` is [H, C, D]. The softmax is taken of logits + log_counts.
    Logits and log counts past the last value are minus infinity.

    Usually `log_counts` is the log of the number of rows that each centroid represents. On a CPU the logits may already
    include the log of the cluster size. Then `log_counts` is the log of the share of the cluster's rows that are not
    attended individually.

    With `rows` [H, C] int32, `values` [H, V, D] holds the values of V clusters, and `rows` are indices into it. The
    first `used` [H] int32 of them are attended, or all if `used` is None.

    `scales` and `clusters` are None if there are `rows`. With `scales`, the values are int8, and the scales convert
    them to real values. With `clusters`, the attention kernel adds a further term to logits + log_counts: the log of
    the number of the cluster's rows that are not attended individually.

    With `ahead`, the attention kernel prefetches centroids and exact rows while the previous kernel runs. There must be
    no centroids with `rows`.
    """

    logits: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None = None
    used: torch.Tensor | None = None
    scales: RowScales | None = None
    clusters: TakenRows | None = None
    ahead: bool = False

    def valid(self) -> torch.Tensor | None:
        """Return a mask [H, C] bool of the valid `rows`; None if all centroids are valid."""
        if self.rows is None or self.used is None:
            return None
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.used[:, None]

    def log_weights(self) -> torch.Tensor:
        """Return the log weights [H, C or more] that are added to the logits."""
        return self.log_counts if self.clusters is None else self.clusters.log_left() + self.log_counts

    def weighted_logits(self) -> torch.Tensor:
        """Return logits + log weights [H, G, C]; minus infinity for centroids that are not `valid`."""
        C, valid = (self.values if self.rows is None else self.rows).shape[1], self.valid()
        logits = self.logits[..., :C] + self.log_weights()[:, None, :C]
        return logits if valid is None else logits.masked_fill(~valid[:, None], -torch.inf)

    def gathered(self) -> torch.Tensor:
        """Return the value of each centroid [H, C, D]; copies the values if there are `rows` or `scales`.

        The value of a centroid that is not `valid` is that of the first cluster.
        """
        if self.scales is not None:
            return self.values.float() * self.scales.rows[..., 1:].float()
        if self.rows is None:
            return self.values
        valid = self.valid()
        rows = self.rows if valid is None else torch.where(valid, self.rows, 0)
        return self.values.gather(1, rows.long()[..., None].expand(-1, -1, self.values.shape[2]))


def one_level(parts: Sequence[ScoredCentroids]) -> ScoredCentroids | None:
    """Concatenate the centroids of several levels of a hierarchy; return None for no levels.

    With more than one level, the tensors are copied, and no level may have `rows`, `scales` or `clusters`.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    assert all(part.rows is None and part.scales is None and part.clusters is None for part in parts)
    sizes = [part.values.shape[1] for part in parts]
    return ScoredCentroids(
        torch.cat([part.logits[..., :size] for part, size in zip(parts, sizes, strict=True)], -1),
        torch.cat([part.log_counts[:, :size] for part, size in zip(parts, sizes, strict=True)], -1),
        torch.cat([part.values for part in parts], 1),
    )
