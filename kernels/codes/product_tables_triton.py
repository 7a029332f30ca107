"""The first kernel of `rank_codes_triton`: tables of products with codebooks; what clusters and exact keys weigh."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.types import CENTROIDS, LEVELS, PER_OCTAVE, LaidOutCodes, WeighedClusters
from sparsekv.kernels.common.launch import dependent_launch
from sparsekv.kernels.common.tiles_triton import (
    LOG2_E,
    aligned,
    capped,
    dot,
    group_rows,
    log2_of_normal,
    power_of_two,
    prefetch,
    share,
    tile_rows,
    wait_for_previous_kernel,
)
from sparsekv.kernels.tables.list_codes import TILE_TOKENS
from sparsekv.kernels.tables.list_look_up_triton import EXACT_PROGRAMS, add_exact
from sparsekv.kernels.tables.types import FEW_RANKS, ExactKeys

HEADS_OF_WORD = 4
TILE_BYTES, STAGES, WARPS = 16_384, 2, 4
TILES_OF_A_PROGRAM = 2


@dataclass(frozen=True)
class ProductTables:
    """What is known of each query before the keys' codes are read.

    tables [H, m, words, 256] int32: byte g of word w is how far below the best the product of query head 4 w + g is;
    tops [H, G, m], each part's best product / ln 2. peaks and totals [H, G, sums], largest logit / ln 2 and sum of
    exponentials, of the clusters' shares, then of the exact keys. logits [H, G, C or more] of the clusters. taken
    [H, C] int32 and coarse, the counts of a `TokenRanks`, are zeros.
    """

    tables: torch.Tensor
    tops: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor
    logits: torch.Tensor
    taken: torch.Tensor
    coarse: torch.Tensor


@triton.jit
def _make_table(
    query, turn, books, tables, tops, head, document, part, softmax_scale, G: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CENTROIDS: tl.constexpr, LEVELS: tl.constexpr, PER_OCTAVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """How far the products of a part of the turned queries with its centroids are below the best of each, in bytes."""
    g, d, j, c = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SIZE), tl.arange(0, CENTROIDS)
    of_part = (document * D + d[:, None]) * D + part * SIZE + j
    turning = tl.load(turn + of_part, mask=(d < D)[:, None] & (j < SIZE), other=0.0)
    place = ((document * PARTS + part) * CENTROIDS + c[None, :]) * SIZE + j[:, None]
    book = tl.load(books + place, mask=(j < SIZE)[:, None], other=0.0)
    wait_for_previous_kernel(EARLY)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    turned = tl.dot(q.to(tl.float32), turning.to(tl.float32), input_precision="tf32x3")
    products = tl.dot(turned, book.to(tl.float32), input_precision="tf32x3") * (softmax_scale * LOG2_E)
    top = tl.max(products, 1)
    below = tl.floor((top[:, None] - products) * PER_OCTAVE + 0.5).to(tl.int32)
    # Products that are not numbers must not carry into the next head's byte either.
    below = tl.where((g < G)[:, None], tl.minimum(tl.maximum(below, 0), LEVELS), 0)
    by_word = tl.reshape(below << (8 * (g % 4))[:, None], [GROUP // 4, 4, CENTROIDS])
    WORDS: tl.constexpr = (G + 3) // 4
    word = tl.arange(0, GROUP // 4)
    place = ((head * PARTS + part) * WORDS + word[:, None]) * CENTROIDS + c
    tl.store(tables + place, tl.sum(by_word, 1), mask=(word < WORDS)[:, None])
    tl.store(tops + (head * G + g) * PARTS + part, top, mask=g < G)


@triton.jit
def _weigh_clusters(
    query, centroids, counts, bias, logits, taken, peaks, totals, head, document, part, parts, sums, C, stride,
    centroids_stride, counts_stride, bias_stride, softmax_scale, softcap, CAPPED: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    MOST_TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of a program's share of a head's clusters, with peak / ln 2 and total of what they weigh; and zeros."""
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    centroids, counts = centroids + document * centroids_stride, counts + document * counts_stride
    logits, bias = logits + head * G * stride, bias + document * bias_stride
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    first, stop = share(part, parts, stride // 16)
    first, stop = tl.multiple_of(first * 16, 16), tl.multiple_of(stop * 16, 16)
    SIZE: tl.constexpr = centroids.dtype.element_ty.primitive_bitwidth // 8
    prefetch(centroids + first * D, (tl.minimum(stop, C) - first) * D, MOST_TILES * TILE * BLOCK_D, SIZE, EARLY)
    wait_for_previous_kernel(EARLY)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=(g < G)[:, None] & (d < D), other=0.0)
    for at in tl.range(first, stop, TILE, num_stages=STAGES):
        c = at + t
        inside = c < stop
        known = inside & (c < C)
        k = tl.load(centroids + c[:, None] * D + d, mask=known[:, None] & (d < D), other=0.0)
        number = tl.load(counts + c, mask=known, other=0)
        factor = tl.load(bias + c, mask=known, other=0.0)
        tl.store(taken + head * C + c, tl.zeros([TILE], tl.int32), mask=known)
        some = capped(dot(q, tl.trans(k)) * softmax_scale, softcap, CAPPED)
        some = tl.where(number > 0, some, -float("inf"))
        tl.store(logits + g[:, None] * stride + c, some, mask=(g < G)[:, None] & inside)
        some = some * LOG2_E + (factor * LOG2_E + log2_of_normal(tl.maximum(number, 1).to(tl.float32)))
        highest = tl.maximum(peak, tl.max(some, 1))
        # All clusters so far may be empty.
        safe = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(some - safe[:, None]), 1)
        peak = highest
    place = (head * G + g) * sums + part
    tl.store(peaks + place, peak, mask=g < G)
    tl.store(totals + place, total, mask=g < G)


# Of several queries over one document each has a head of its own, `each` of them a head of the document.
@triton.jit(do_not_specialize=["exact_rows", "each"])
def _tables_kernel(
    query, turn, books, centroids, counts, bias, exact_keys, exact_count, sinks, tables, tops, coarse, logits, taken,
    peaks, totals, bins, shares, sums, C, stride, centroids_stride, counts_stride, bias_stride, exact_rows,
    exact_stride, each, softmax_scale, softcap, SHARED: tl.constexpr, CAPPED: tl.constexpr, COUNTED: tl.constexpr,
    HAS_SINKS: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CENTROIDS: tl.constexpr, LEVELS: tl.constexpr,
    PER_OCTAVE: tl.constexpr, EXACT_PROGRAMS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    MOST_TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A part's table, or a share of the exact keys, or a share of the clusters; and zeros for the counts of ranks."""
    which, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    document = (tl.program_id(1) // each).to(tl.int64) if SHARED else head
    if which < PARTS:
        _make_table(
            query, turn, books, tables, tops, head, document, which, softmax_scale, G, GROUP, PARTS, SIZE, BLOCK_SIZE,
            D, BLOCK_D, CENTROIDS, LEVELS, PER_OCTAVE, EARLY,
        )  # fmt: skip
    elif which < PARTS + EXACT_PROGRAMS:
        wait_for_previous_kernel(EARLY)
        add_exact(
            query, exact_keys + (document - head) * exact_stride, exact_count, sinks, peaks, totals, head,
            which - PARTS, sums, exact_rows, exact_stride,
            softmax_scale, softcap, CAPPED, COUNTED, HAS_SINKS, G, GROUP, D, BLOCK_D, EXACT_PROGRAMS, TILE,
        )  # fmt: skip
    else:
        _weigh_clusters(
            query, centroids, counts, bias, logits, taken, peaks, totals, head, document,
            which - PARTS - EXACT_PROGRAMS, shares, sums, C, stride, centroids_stride, counts_stride, bias_stride,
            softmax_scale, softcap, CAPPED, G, GROUP, D, BLOCK_D, TILE, STAGES, MOST_TILES, EARLY,
        )  # fmt: skip
    if which == 0:
        for at in range(0, bins, CENTROIDS):
            bin = at + tl.arange(0, CENTROIDS)
            tl.store(coarse + head * bins + bin, tl.zeros([CENTROIDS], tl.int32), mask=bin < bins)


def make_tables(
    query: torch.Tensor,
    codes: LaidOutCodes,
    clusters: WeighedClusters,
    exact: ExactKeys,
    softmax_scale: float,
    softcap: float | None,
) -> ProductTables:
    """For queries [H, G, D], several of a document's head or one; reads the clusters' keys once for each."""
    (H, G, D), (documents, m, _, size), device = query.shape, codes.books.shape, query.device
    C, query = clusters.counts.shape[1], query.contiguous()
    rows = tile_rows(D, query.dtype, TILE_BYTES)
    shares = triton.cdiv(C, rows * TILES_OF_A_PROGRAM)
    stride, sums = aligned(C), shares + EXACT_PROGRAMS
    found = ProductTables(
        tables=torch.empty(H, m, -(-G // HEADS_OF_WORD), CENTROIDS, dtype=torch.int32, device=device),
        tops=torch.empty(H, G, m, device=device),
        peaks=torch.empty(H, G, sums, device=device),
        totals=torch.empty(H, G, sums, device=device),
        logits=torch.empty(H, G, stride, device=device),
        taken=torch.empty(H, C, dtype=torch.int32, device=device),
        coarse=torch.empty(H, codes.words.shape[2] // TILE_TOKENS, FEW_RANKS // 2, dtype=torch.int32, device=device),
    )
    centroids, counts, bias = clusters.keys.to(query.dtype), clusters.counts, clusters.bias
    _tables_kernel[(m + EXACT_PROGRAMS + shares, H)](
        query, codes.turn, codes.books, centroids, counts, bias, exact.keys,
        found.taken if exact.count is None else exact.count,
        found.peaks if exact.sinks is None else exact.sinks.contiguous(), found.tables, found.tops, found.coarse,
        found.logits, found.taken, found.peaks, found.totals, found.coarse[0].numel(), shares, sums, C, stride,
        centroids.stride(0), counts.stride(0), bias.stride(0), exact.keys.shape[1], exact.keys.stride(0),
        H // documents, softmax_scale, softcap or 0.0, SHARED=documents < H, CAPPED=softcap is not None,
        COUNTED=exact.count is not None, HAS_SINKS=exact.sinks is not None, G=G,
        GROUP=group_rows(G), PARTS=m, SIZE=size, BLOCK_SIZE=group_rows(size), D=D, BLOCK_D=power_of_two(D),
        CENTROIDS=CENTROIDS, LEVELS=LEVELS, PER_OCTAVE=PER_OCTAVE, EXACT_PROGRAMS=EXACT_PROGRAMS, TILE=rows,
        STAGES=STAGES, MOST_TILES=TILES_OF_A_PROGRAM, num_warps=WARPS, **dependent_launch(device),
    )  # fmt: skip
    return found
