"""`rank_jointly` and `join_chosen` in Triton: ranks of keys for several queries, and the union of their choices."""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.code_ranks import CENTROIDS, HEADROOM, JoinedKeys
from sparsekv.kernels.common.launch import aligned, dependent_launch, power_of_two
from sparsekv.kernels.common.tiles_triton import LOG2_E, capped, dot, wait_for_previous_kernel
from sparsekv.kernels.posting_lists.list_ranks import BINS, FRACTION_BITS, RANKS, TokenRanks, lowest_rank
from sparsekv.kernels.posting_lists.packed_triton import byte_of, exp2, one_each, sums_of_fours
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS, TILE_WORDS

FLAGGED, TILE = 1024, 1024  # chosen keys that a program flags, and keys of a tile that a program counts or lists


@triton.jit(do_not_specialize=["number"])
def _flag_kernel(chosen, flags, number, padded, FLAGGED: tl.constexpr, EARLY: tl.constexpr):
    """Set the flag of each chosen key; the flag of a duplicate is set again."""
    head, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * FLAGGED + tl.arange(0, FLAGGED)
    wait_for_previous_kernel(EARLY)
    key = tl.load(chosen + head * number + at, mask=at < number, other=0)
    tl.store(flags + head * padded + key, tl.full([FLAGGED], 1, tl.int8), mask=at < number)


@triton.jit
def _count_flags_kernel(flags, counts, TILE: tl.constexpr, EARLY: tl.constexpr):
    """Count the flagged keys of a tile."""
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    wait_for_previous_kernel(EARLY)
    flagged = tl.load(flags + tile * TILE + tl.arange(0, TILE)).to(tl.int32)
    tl.store(counts + tile, tl.sum(flagged, 0))


@triton.jit(do_not_specialize=["keys", "capacity"])
def _list_flags_kernel(
    flags, counts, labels, taken, rows, used, keys, capacity, labels_stride, rows_stride, groups, TILE: tl.constexpr,
    TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """List the flagged keys of a tile, after the keys of earlier tiles, and count the tile's keys by group."""
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    key, every = tile * TILE + tl.arange(0, TILE), tl.arange(0, TILES)
    group = tl.load(labels + head * labels_stride + key, mask=key < keys, other=0).to(tl.int32)
    wait_for_previous_kernel(EARLY)
    flagged = tl.load(flags + (head * tiles + tile) * TILE + tl.arange(0, TILE)).to(tl.int32)
    of_tiles = tl.load(counts + head * tiles + every, mask=every < tiles, other=0)
    place = tl.sum(tl.where(every < tile, of_tiles, 0), 0) + tl.cumsum(flagged, 0) - 1
    tl.store(rows + head * rows_stride + place, key, mask=(flagged > 0) & (place < capacity))
    tl.atomic_add(taken + head * groups + group, 1, mask=flagged > 0, sem="relaxed")
    if tile == 0:
        tl.store(used + head, tl.sum(of_tiles, 0))


def join_chosen_triton(chosen, capacity, groups):
    """Run `join_chosen` on a GPU."""
    (H, keys), number, device = groups.labels.shape, chosen[0].numel(), chosen.device
    tiles, early = triton.cdiv(keys, TILE), dependent_launch(device)
    flags = torch.zeros(H, tiles * TILE, dtype=torch.int8, device=device)
    counts = torch.empty(H, tiles, dtype=torch.int32, device=device)
    rows = torch.empty(H, aligned(capacity), dtype=torch.int32, device=device)
    used = torch.empty(H, dtype=torch.int32, device=device)
    _flag_kernel[(triton.cdiv(number, FLAGGED), H)](
        chosen.contiguous(), flags, number, tiles * TILE, FLAGGED=FLAGGED, num_warps=4, **early
    )
    _count_flags_kernel[(tiles, H)](flags, counts, TILE=TILE, num_warps=2, **early)
    _list_flags_kernel[(tiles, H)](
        flags, counts, groups.labels, groups.taken, rows, used, keys, capacity, groups.labels.stride(0),
        rows.stride(0), groups.taken.shape[1], TILE=TILE, TILES=power_of_two(tiles), num_warps=4, **early,
    )  # fmt: skip
    return JoinedKeys(rows[:, :capacity], used)


WIDE = 128  # head dim above which tiles are halved, so that they fit in the shared memory of older GPUs
SLOTS, MOST_ROWS, WARPS, STAGES = 128, 64, 4, 2  # keys of a program, most queries in a product, warps, pipeline stages


@triton.jit
def _store_ranks(rank, ranks, first, TILE: tl.constexpr):
    """Write the ranks of a tile's keys, from key `first` of the tile on, in the layout of `TokenRanks`."""
    SLOTS: tl.constexpr = rank.shape[0]
    i, w = tl.arange(0, SLOTS), tl.arange(0, SLOTS // 4)
    by_byte = tl.reshape(rank << (8 * (i // 8 % 4)), [SLOTS // 32, 4, 8])
    words = tl.reshape(tl.sum(by_byte, 1), [SLOTS // 4])
    tl.store(ranks + first // 8 + w % 2 * (TILE // 8) + w // 2, words)


@triton.jit
def _named_keys(words, books, head, key, keys, head_stride, quad_stride, key_stride, PARTS: tl.constexpr,
                SIZE: tl.constexpr, CENTROIDS: tl.constexpr):  # fmt: skip
    """Decode keys' codes to centroids [keys, PARTS * SIZE] float16, by which turned queries are multiplied."""
    SOME: tl.constexpr = key.shape[0]
    quad, part, j = tl.arange(0, PARTS // 4), tl.arange(0, PARTS), tl.arange(0, SIZE)
    place = words + head * head_stride + quad[None, :] * quad_stride + key[:, None] * key_stride
    four = tl.load(place, mask=key[:, None] < keys, other=0)
    # The axis of the last join is the innermost.
    codes = tl.join(tl.join(byte_of(four, 0), byte_of(four, 2)), tl.join(byte_of(four, 1), byte_of(four, 3)))
    codes = tl.reshape(codes, [SOME, PARTS])
    row = (head * PARTS + part[None, :]) * CENTROIDS + codes
    named = tl.load(books + row[:, :, None] * SIZE + j[None, None, :])
    return tl.reshape(named, [SOME, PARTS * SIZE])


@triton.jit(do_not_specialize=["rows", "keys", "least"])
def _joint_kernel(
    query, factors, totals, words, books, ranks, rows, keys, padded, head_stride, quad_stride, key_stride, least,
    softcap, CAPPED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    CENTROIDS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, FRACTION_BITS: tl.constexpr,
    RANKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the ranks of a program's keys, and write them in the layout of `TokenRanks`."""
    D: tl.constexpr = PARTS * SIZE
    first, head = tl.program_id(0) * SLOTS, tl.program_id(1).to(tl.int64)
    i, d = tl.arange(0, SLOTS), tl.arange(0, D)
    k = _named_keys(
        words, books, head, first + i, keys, head_stride, quad_stride, key_stride, PARTS, SIZE, CENTROIDS
    )  # fmt: skip
    wait_for_previous_kernel(EARLY)
    score = tl.zeros([SLOTS], tl.float32)
    for at in range(0, rows, ROWS):
        r = at + tl.arange(0, ROWS)
        place, known = head * rows + r, r < rows
        q = tl.load(query + place[:, None] * D + d, mask=known[:, None], other=0.0)
        factor = tl.load(factors + place, mask=known, other=0.0)
        # Rows past the last query have an infinite total, and so they add 0.
        total = tl.load(totals + place, mask=known, other=float("inf")) * LOG2_E
        logits = dot(q, tl.trans(k)) * factor[:, None]
        if CAPPED:
            logits = capped(logits, softcap, CAPPED)
        score += tl.sum(exp2(logits * LOG2_E - total[:, None]), 0)
    score = tl.where(first + i < keys, score / rows, 0.0)
    rank = (score.to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    _store_ranks(rank, ranks + head * (padded // 4) + first // TILE * (TILE // 4), first % TILE, TILE)


@triton.jit
def _coarse_kernel(ranks, coarse, WORDS: tl.constexpr, BINS: tl.constexpr, EARLY: tl.constexpr):
    """Count a tile's ranks in bins of 16 ranks."""
    tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    wait_for_previous_kernel(EARLY)
    place = ranks + tile * (2 * WORDS) + tl.arange(0, WORDS)
    some, others = tl.load(place), tl.load(place + WORDS)
    counts = tl.zeros([WORDS], tl.int64)
    for at in tl.static_range(4, 32, 8):
        counts += one_each(some, at) + one_each(others, at)
    tl.store(coarse + tile * BINS + tl.arange(0, BINS), sums_of_fours(counts, WORDS // 4))


def rank_jointly_triton(query, totals, codes, wanted, softmax_scale, softcap=None):
    """Run `rank_jointly` on a GPU; reads the codes once.

    The number of parts and the channels of a part must be powers of two.
    """
    (H, rows, D), (_, parts, _, size), device = query.shape, codes.books.shape, query.device
    tiles, early = triton.cdiv(codes.keys, TILE_TOKENS), dependent_launch(device)
    slots, most_rows = (SLOTS, MOST_ROWS) if D <= WIDE else (SLOTS // 2, MOST_ROWS // 2)
    turned = query.float() @ codes.turn.float()
    # Codebooks are float16. Queries are scaled to a largest magnitude of 1, and converted to the same dtype.
    largest = turned.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    turned, totals = (turned / largest).to(codes.books.dtype).contiguous(), totals.contiguous()
    ranks = torch.empty(H, tiles, 2, TILE_WORDS, dtype=torch.int32, device=device)
    coarse = torch.empty(H, tiles, BINS, dtype=torch.int32, device=device)
    _joint_kernel[(tiles * TILE_TOKENS // slots, H)](
        turned, largest * softmax_scale, totals, codes.words, codes.books, ranks, rows, codes.keys,
        tiles * TILE_TOKENS, *codes.words.stride(), lowest_rank(max(1, wanted >> HEADROOM)), softcap or 0.0,
        CAPPED=softcap is not None, ROWS=max(16, min(most_rows, power_of_two(rows))), PARTS=parts, SIZE=size,
        CENTROIDS=CENTROIDS, SLOTS=slots, TILE=TILE_TOKENS, FRACTION_BITS=FRACTION_BITS, RANKS=RANKS,
        num_warps=WARPS, num_stages=STAGES, **early,
    )  # fmt: skip
    _coarse_kernel[(tiles, H)](ranks, coarse, WORDS=TILE_WORDS, BINS=BINS, num_warps=1, **early)
    return TokenRanks(ranks, coarse, totals, codes.keys)
