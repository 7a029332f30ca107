"""What kernels read of keys and values: int8 rows with their scales, chosen rows, and centroids with their logits.

Operations on rows: runs of neighbouring rows, slots of several sequences, and RoPE.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch

from sparsekv.kernels.common.launch import power_of_two
from sparsekv.kernels.common.on_gpu import on_gpu


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


@on_gpu("sparsekv.kernels.common.run_rows_triton:store_in_slots_triton", tensor=lambda stored: stored[0])
def store_in_slots(
    stored: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into the caches of S sequences.

    On a GPU this is one launch. The plain-torch implementation synchronises.

    Args:
        stored: keys and values [S, Hk, capacity, D], contiguous.
        new: keys and values [Hk, T, D] of the tokens.
        slots: [T] int64, the index of each token's sequence.
        rows: [T] int64, each token's row in its sequence, below the capacity. A token with negative row is not stored.
    """
    placed = rows >= 0
    if not placed.all():
        slots, rows, new = slots[placed], rows[placed], (new[0][:, placed], new[1][:, placed])
    for into, of_tokens in zip(stored, new, strict=True):
        into[slots, :, rows] = of_tokens.transpose(0, 1)


def _of_one_size(stored: tuple[torch.Tensor, torch.Tensor], *_: object) -> bool:
    return stored[0].shape == stored[1].shape


@on_gpu(
    "sparsekv.kernels.common.run_rows_triton:store_new_row_triton", tensor=lambda stored: stored[0], fits=_of_one_size
)
def store_new_row(
    stored: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor], row: torch.Tensor
) -> None:
    """Write the key and the value of one token into a cache; on a GPU this is one launch if D = D'.

    Args:
        stored: keys [H, R, D] and values [H, R, D']. The rows of a head are contiguous; heads may have any stride, on a
            GPU the same for keys and values if D = D'.
        new: key [H, 1, D] and value [H, 1, D'] of the token.
        row: [1] int64, the token's row.
    """
    for into, of_token in zip(stored, new, strict=True):
        into.index_copy_(1, row, of_token)


def rotate(rows: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate rows by RoPE to the given positions; negative positions undo a rotation.

    Args:
        rows: [..., T, D].
        positions: [..., T] int64; missing leading dimensions are broadcast.
        frequencies: [P] float32, radians per position of each pair of channels; 2 P at most D.
        interleaved: a pair is channels 2 i and 2 i + 1, else i and i + P. Channels from 2 P on are not rotated.

    Returns:
        [..., T, D] float32. Allocates two more tensors of this size.
    """
    # Angles are float32, as in models, so that undoing a model's rotation uses the same rounded angles.
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = split_pairs(rows.float(), len(frequencies), interleaved)
    turned = first * cos - second * sin, second * cos + first * sin
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs, rest], -1)


def split_pairs(rows: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split rows into views of the RoPE pairs' first and second channels [..., P] and of the rest [..., D - 2 P].

    `interleaved` is as in `rotate`.
    """
    turned, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    if interleaved:
        return turned[..., 0::2], turned[..., 1::2], rest
    return turned[..., :pairs], turned[..., pairs:], rest


def fill_budget(lengths: torch.Tensor, budget: int) -> torch.Tensor:
    """Cut runs, ordered best first, to `budget` rows in total.

    Whole runs are kept, and then the start of the run that exceeds the budget.

    Args:
        lengths: [..., R] int, best run first.
        budget: number of rows to keep.

    Returns:
        [..., R] lengths, whose sum is the smaller of the budget and the number of all rows.
    """
    before = lengths.cumsum(-1) - lengths
    return torch.minimum((budget - before).clamp(min=0), lengths)


def expand_runs(starts: torch.Tensor, lengths: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand runs to their row indices, run after run, in a fixed number of slots.

    Args:
        starts: [..., R] int, first row of each run.
        lengths: [..., R] int, number of rows of each run; 0 is allowed anywhere.
        capacity: number of slots; further rows are left out.

    Returns:
        rows [..., capacity] int64 (0 in unused slots) and valid [..., capacity] bool.
    """
    ends = lengths.long().cumsum(-1)
    slots = torch.arange(capacity, device=starts.device).expand(*starts.shape[:-1], capacity).contiguous()
    run = torch.searchsorted(ends, slots, right=True)
    valid = run < starts.shape[-1]
    run = run.clamp(max=starts.shape[-1] - 1)
    offset = slots - (ends - lengths).gather(-1, run)
    return torch.where(valid, starts.long().gather(-1, run) + offset, 0), valid


def expand_full_runs(starts: torch.Tensor, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
    """Expand runs that fill all slots to their row indices [..., capacity] int64; `expand_runs` allows unused slots.

    Args:
        starts: [..., R] int64.
        lengths: [..., R] int64, which must sum to `capacity` along the last axis.

    Raises:
        RuntimeError: the sum of all lengths is not the number of slots of the result. Single sums are not checked.
    """
    apart = starts - (lengths.cumsum(-1) - lengths)
    size = capacity * starts.shape[:-1].numel()
    rows = torch.repeat_interleave(apart.flatten(), lengths.flatten(), output_size=size)
    return rows.view(*starts.shape[:-1], capacity).add_(_slots(capacity, starts.device))


@lru_cache(maxsize=4)
def _slots(capacity: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(capacity, device=device)


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
    """

    logits: torch.Tensor
    log_counts: torch.Tensor
    values: torch.Tensor
    rows: torch.Tensor | None = None
    used: torch.Tensor | None = None
    scales: RowScales | None = None
    clusters: TakenRows | None = None

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
