"""`decode_attention` in Triton: flash-decoding over chosen rows, exact rows and centroids.

Every query attends to the exact rows: the document's first tokens (sinks), its last tokens (tail), and new tokens. In
the first kernel, each program computes a partial softmax over an equal share of a head's centroids, exact rows and
chosen rows. Part of the chosen rows may be left to programs that finish early. A second kernel merges the partial
softmaxes. Logits are in units of log 2. The first kernel reads chosen rows by a list of row indices, and prefetches
their tiles. If chosen rows are runs of neighbouring rows, an earlier launch writes this list.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from sparsekv.kernels.attention import running_softmax_triton as softmax
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.kernel_inputs import ScoredCentroids, one_level
from sparsekv.kernels.common.launch import (
    aligned,
    count_sms,
    dependent_launch,
    group_rows,
    have_equal_strides,
    num_splits,
    side_by_side,
    tile_rows,
)
from sparsekv.kernels.common.run_rows_triton import list_rows
from sparsekv.kernels.common.tiles_triton import LOG2_E, from_pairs, in_pairs, load_pairs, scaled_queries, scales_of


@triton.jit
def share_of_stands(first, last, units, rows, FIFTHS: tl.constexpr):
    """Return the range of centroids that a program processes: those in work units `first` to `last` of a head.

    A work unit is the cost of one row. The head's `rows` centroids take its first `units` work units, FIFTHS / 5 units
    each. Both ends of the range are multiples of 16, so that logits are read four at a time.
    """
    stop = tl.minimum(tl.cdiv(tl.minimum(last, units) * 5 // FIFTHS, 16), tl.cdiv(rows, 16)) * 16
    begin = tl.cdiv(tl.maximum(first, 0) * 5 // FIFTHS, 16) * 16
    return tl.multiple_of(begin, 16), tl.multiple_of(stop, 16)


@triton.jit
def stand_logits_of(logits, log_counts, counts, taken, c, inside, there, of_group, LEFT: tl.constexpr):
    """Load logits of centroids `c` of a head and add the centroids' log weights, in units of log 2.

    With LEFT, a log weight is the log of the number of tokens left (counts - taken), plus `log_counts`. Otherwise it is
    `log_counts` alone.
    """
    if LEFT:
        number = tl.load(counts + c, mask=there, other=0) - tl.load(taken + c, mask=there, other=0)
        log_left = common.log2_of_normal(tl.maximum(number, 1).to(tl.float32))
        log_left += tl.load(log_counts + c, mask=there, other=0.0) * LOG2_E
        log_left = tl.where(number > 0, log_left, -float("inf"))
    else:
        log_left = tl.load(log_counts + c, mask=inside, other=-float("inf")) * LOG2_E
    return tl.load(logits + c, mask=of_group[:, None] & inside, other=0.0) * LOG2_E + log_left


@dataclass(frozen=True)
class TileConfig:
    """Sizes by which a head's rows are split over programs.

    `programs` is the number of programs on an SM, each of `warps` warps. A program reads tiles of `tile_bytes` in
    `stages` pipeline stages. If a program has less than two such tiles of work, it reads tiles of `short_tile_bytes`,
    so that its second tile is not nearly empty.

    The `fifths` are costs of a centroid, in fifths of the cost of a chosen row. `plain_fifths` is for centroids whose
    log weights are arguments of the kernel. `weighed_fifths` is for centroids whose log weights the kernel computes
    from counts, in short tiles and in full tiles. `listed_fifths` is for centroids with a list of rows.
    """

    tile_bytes: int
    short_tile_bytes: int
    stages: int
    programs: int
    warps: int
    plain_fifths: int
    weighed_fifths: tuple[int, int]
    listed_fifths: int

    @property
    def most_registers(self) -> int:
        """Maximum number of registers of a thread with which `programs` programs fit on an SM."""
        return min(255, 65_536 // (self.programs * self.warps * 32))


# These costs are measured. A centroid costs less than a row because its key is not read, and plain centroids are
# contiguous.
IN_HALF_PRECISION = TileConfig(
    16_384, 8192, stages=2, programs=4, warps=4, plain_fifths=2, weighed_fifths=(3, 4), listed_fifths=5
)
# An int8 row has half the bytes of a row in half precision. Its tile can be loaded only after the row indices. With
# five stages, and no fewer, the tile is prefetched two iterations ahead. A program of one warp never waits for another
# warp.
IN_8_BITS = TileConfig(
    4096, 4096, stages=5, programs=8, warps=1, plain_fifths=4, weighed_fifths=(4, 4), listed_fifths=8
)
# Pipeline stages of the loops over plain centroids and over exact rows. A third stage helps only for centroids.
STAND_STAGES, EXACT_STAGES = 3, 2
MERGED_COLUMNS = 32
# Equal shares do not finish at the same time. Therefore QUEUED_PERCENT of the chosen rows go, a tile at a time, to
# programs that finish early, if every program has at least LEAST_TILES tiles.
QUEUED_PERCENT, LEAST_TILES = 20, 4
PREFETCHED_ROWS = 128  # most centroids, and most exact rows, that a program prefetches before it waits (`ahead`)


# These sizes grow as a model decodes, and must not make Triton recompile.
@triton.jit(do_not_specialize=["exact_rows", "chosen_rows"])
def _partial_kernel(
    query, keys, values, row_scales, channel_scales, channel_offsets, units, rows, rows_used,
    exact_keys, exact_values, exact_count, stand_logits, stand_counts, stand_values, stand_scales, of_counts, of_taken,
    listed_logits, listed_counts, listed_values, listed_rows, listed_used, queue, peaks, totals, outputs,
    head_stride, row_stride, scales_stride, chosen_rows, rows_stride, rows_used_stride, exact_rows, exact_stride,
    stand_rows, logits_stride, counts_stride, stand_stride, of_stride, listed, listed_logits_stride,
    listed_counts_stride, listed_stride, listed_values_stride, used_stride, softmax_scale, softcap,
    CAPPED: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STAND_STAGES: tl.constexpr, EXACT_STAGES: tl.constexpr, ROW_STAGES: tl.constexpr,
    STAND_FIFTHS: tl.constexpr, LISTED_FIFTHS: tl.constexpr, QUEUED_PERCENT: tl.constexpr, LISTED: tl.constexpr,
    USED: tl.constexpr, COUNTED: tl.constexpr, ROWS_USED: tl.constexpr, SCALED: tl.constexpr,
    STANDS_SCALED: tl.constexpr, LEFT: tl.constexpr, PREFETCHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    of_group, in_row = g < G, d < D
    if PREFETCHED:
        # The shares are those of all rows, with no listed centroids. The rows in use may be fewer, and then a few other
        # rows are prefetched.
        before = (stand_rows * STAND_FIFTHS + 4) // 5
        first, last = common.share(
            split, tl.num_programs(0), before + exact_rows + chosen_rows - chosen_rows * QUEUED_PERCENT // 100
        )
        begin, stop = share_of_stands(first, last, before, stand_rows, STAND_FIFTHS)
        begin = tl.minimum(begin, stand_rows)
        SIZE: tl.constexpr = stand_values.dtype.element_ty.primitive_bitwidth // 8
        MOST: tl.constexpr = PREFETCHED * BLOCK_D
        ahead = stand_values + head * stand_stride + begin * D
        common.prefetch(ahead, (tl.minimum(stop, stand_rows) - begin) * D, MOST, SIZE, EARLY)
        begin = tl.minimum(tl.maximum(first - before, 0), exact_rows)
        ahead = head * exact_stride + begin * D
        number = (tl.minimum(last - before, exact_rows) - begin) * D
        common.prefetch(exact_keys + ahead, number, MOST, SIZE, EARLY)
        common.prefetch(exact_values + ahead, number, MOST, SIZE, EARLY)
    common.wait_for_previous_kernel(EARLY)
    q = tl.load(query + (head * G + g[:, None]) * D + d, mask=of_group[:, None] & in_row, other=0.0)
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    output, scale = tl.zeros([GROUP, BLOCK_D], tl.float32), softmax_scale * LOG2_E
    # A head's work is one sequence of work units: centroids, listed centroids, exact rows, chosen rows. A unit is the
    # cost of one row.
    if ROWS_USED:
        chosen_rows = tl.minimum(tl.load(rows_used + head * rows_used_stride), chosen_rows)
    if USED:
        listed = tl.minimum(tl.load(listed_used + head * used_stride), listed)
    if COUNTED:
        exact_rows = tl.minimum(tl.load(exact_count), exact_rows)
    stands = (stand_rows * STAND_FIFTHS + 4) // 5
    lists = (listed * LISTED_FIFTHS + 4) // 5 if LISTED else 0
    queued = chosen_rows * QUEUED_PERCENT // 100
    first, last = common.share(split, tl.num_programs(0), stands + lists + exact_rows + chosen_rows - queued)

    exact_first, exact_last = first - stands - lists, last - stands - lists
    exact_keys, exact_values = exact_keys + head * exact_stride, exact_values + head * exact_stride
    stop = tl.minimum(exact_last, exact_rows)
    for at in tl.range(tl.maximum(exact_first, 0), stop, TILE, num_stages=EXACT_STAGES):
        inside = at + t < stop
        mask = inside[:, None] & in_row
        k = tl.load(exact_keys + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        v = tl.load(exact_values + (at + t)[:, None] * D + d, mask=mask, other=0.0)
        bias = tl.where(inside, 0.0, -float("inf"))
        logits = softmax.tile_logits(common.dot(q, tl.trans(k)), bias, scale, softmax_scale, softcap, CAPPED)
        peak, total, output = softmax.add_tile(peak, total, output, logits, v)

    if LISTED:
        logits_of = listed_logits + (head * G + g[:, None]) * listed_logits_stride
        values_of = listed_values + head * listed_values_stride
        begin, stop = share_of_stands(first - stands, last - stands, lists, listed, LISTED_FIFTHS)
        for at in tl.range(begin, stop, TILE, num_stages=ROW_STAGES):
            c = at + t
            inside = c < stop
            there = inside & (c < listed)
            row = tl.load(listed_rows + head * listed_stride + c, mask=there, other=0)
            count = tl.load(listed_counts + head * listed_counts_stride + c, mask=inside, other=-float("inf"))
            # A cluster whose rows are all attended individually has no rows left to represent.
            mask = (there & (count > -float("inf")))[:, None] & in_row
            v = tl.load(values_of + row[:, None] * D + d, mask=mask, other=0.0)
            logits = (tl.load(logits_of + c, mask=of_group[:, None] & inside, other=0.0) + count) * LOG2_E
            logits = tl.where(there, logits, -float("inf"))
            peak, total, output = softmax.add_tile(peak, total, output, logits, v)

    logits_of = stand_logits + (head * G + g[:, None]) * logits_stride
    values_of, log_counts = stand_values + head * stand_stride, stand_counts + head * counts_stride
    of_counts, of_taken = of_counts + head * of_stride, of_taken + head * stand_rows
    begin, stop = share_of_stands(first, last, stands, stand_rows, STAND_FIFTHS)
    if not STANDS_SCALED:
        for at in tl.range(begin, stop, TILE, num_stages=STAND_STAGES):
            c = at + t
            inside = c < stop
            there = inside & (c < stand_rows)
            v = tl.load(values_of + c[:, None] * D + d, mask=there[:, None] & in_row, other=0.0)
            logits = stand_logits_of(logits_of, log_counts, of_counts, of_taken, c, inside, there, of_group, LEFT)
            peak, total, output = softmax.add_tile(peak, total, output, logits, v)

    keys, values = keys + head * head_stride, values + head * head_stride
    rows += head * rows_stride
    if SCALED:
        EXACT: tl.constexpr = q.dtype == tl.float32
        channels, offsets = channel_scales + head * D, channel_offsets + head * D
        q_first, q_second, shift, of_queries, offset = scaled_queries(
            q, channels, offsets, d, in_row, softmax_scale if CAPPED else scale, False, GROUP, BLOCK_D
        )
        row_scales += head * scales_stride
        # Outputs are accumulated in multiples of the head's unit (`RowScales.units`).
        unit = tl.load(units + head)
        first_output, second_output = in_pairs(output / unit, GROUP, BLOCK_D)
        d = tl.arange(0, BLOCK_D // 2)
        in_row = d < D // 2
    if STANDS_SCALED:
        for at in tl.range(begin, stop, TILE, num_stages=STAND_STAGES):
            c = at + t
            inside = c < stop
            there = inside & (c < stand_rows)
            v = tl.load(values_of + c[:, None] * (D // 2) + d, mask=there[:, None] & in_row, other=0)
            _, of_values = scales_of(tl.load(stand_scales + head * stand_rows + c, mask=there, other=0), 1.0, unit)
            logits = stand_logits_of(logits_of, log_counts, of_counts, of_taken, c, inside, there, of_group, LEFT)
            peak, total, first_output, second_output = softmax.add_values(
                peak, total, first_output, second_output, logits, v, of_values, EXACT
            )
    begin, stop = tl.maximum(exact_first - exact_rows, 0), exact_last - exact_rows
    while begin < chosen_rows:
        for at in tl.range(begin, stop, TILE, num_stages=ROW_STAGES):
            inside = at + t < stop
            row = tl.load(rows + at + t, mask=inside, other=0)
            place = row[:, None] * row_stride + d
            if SCALED:
                # Slots past the end read row 0, whose numbers are finite. The weights of these slots are zero.
                k, v = load_pairs(keys, place, in_row, D == BLOCK_D), load_pairs(values, place, in_row, D == BLOCK_D)
                words = tl.load(row_scales + row)
                peak, total, first_output, second_output = softmax.add_pairs(
                    peak, total, first_output, second_output, q_first, q_second, shift, of_queries, offset, k, v, words,
                    inside, unit, softcap, CAPPED, False, EXACT,
                )  # fmt: skip
            else:
                mask, bias = inside[:, None] & in_row, tl.where(inside, 0.0, -float("inf"))
                k = tl.load(keys + place, mask=mask, other=0.0)
                v = tl.load(values + place, mask=mask, other=0.0)
                logits = softmax.tile_logits(common.dot(q, tl.trans(k)), bias, scale, softmax_scale, softcap, CAPPED)
                peak, total, output = softmax.add_tile(peak, total, output, logits, v)
        begin = chosen_rows
        if QUEUED_PERCENT:
            begin += tl.atomic_add(queue + head, TILE, sem="relaxed") - queued
        stop = tl.minimum(begin + TILE, chosen_rows)
    if SCALED:
        output = from_pairs(first_output, second_output, GROUP, BLOCK_D) * unit
        d = tl.arange(0, BLOCK_D)
    softmax.store_partial(peaks, totals, outputs, split, tl.num_programs(0), head, g, G, d, peak, total, output, D)


def _tensors(part: ScoredCentroids | None, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a set of centroids as the kernel reads it: logits, log counts, values and, for listed centroids, rows.

    Tensors that are not padded to a multiple of 16 are copied, and so are values that are not contiguous within a head.
    `other` is a placeholder for missing tensors, and is never read.
    """
    if part is None:
        return other, other, other, other
    logits, log_counts, rows = part.logits, part.log_counts, part.rows
    size = aligned(part.values.shape[1] if rows is None else logits.shape[2])
    if logits.shape[2] != size:
        logits = pad(logits, (0, size - logits.shape[2]), value=-torch.inf)
    if part.clusters is None and log_counts.shape[1] != size:
        log_counts = pad(log_counts, (0, size - log_counts.shape[1]), value=-torch.inf)
    if rows is not None and rows.shape[1] != size:
        rows = pad(rows, (0, size - rows.shape[1]))
    values = side_by_side(part.values)
    values = values if part.scales is None else values.view(torch.int16)
    return logits, log_counts, values, other if rows is None else rows


def decode_attention_triton(
    query, runs, exact, centroids, softmax_scale, softcap=None, sink_logits=None, exact_count=None
):
    """Run `decode_attention` on a GPU.

    Allocates float32 partial outputs [H, programs, G, D]; all heads together have about four programs per SM, or eight
    for int8 rows. For runs it also allocates their row indices [H, capacity] int32.
    """
    assert all(have_equal_strides(*pair) for pair in ((runs.keys, runs.values), exact))
    (H, G, D), E = query.shape, exact[0].shape[1]
    query, early = query.contiguous(), dependent_launch(query.device)
    plain = one_level([part for part in centroids if part.rows is None])
    listed = next((part for part in centroids if part.rows is not None), None)
    used = None if listed is None else listed.used
    logits, log_counts, values, _ = _tensors(plain, query)
    listed_logits, listed_counts, listed_values, listed_rows = _tensors(listed, query)
    C, S = 0 if plain is None else values.shape[1], 0 if listed is None else listed_logits.shape[2]
    form = IN_HALF_PRECISION if runs.scales is None else IN_8_BITS
    stand_scales = None if plain is None else plain.scales
    # Values of int8 centroids are accumulated in the unit of the int8 rows (`RowScales.units`).
    assert stand_scales is None or runs.scales is not None
    clusters = None if plain is None else plain.clusters
    of_counts, of_taken = (query, query) if clusters is None else (clusters.counts, clusters.taken)
    short_fifths, stand_fifths = form.weighed_fifths if clusters else (form.plain_fifths, form.plain_fifths)
    units = (C * stand_fifths + S * form.listed_fifths) // 5 + E + runs.capacity
    programs = num_splits(H, units, form.programs * count_sms(query.device), grain=10)
    tile = tile_rows(D, runs.keys.dtype, form.tile_bytes)
    if units < 2 * tile * programs:
        tile, stand_fifths = tile_rows(D, runs.keys.dtype, form.short_tile_bytes), short_fifths
    queue = runs.queue if runs.capacity >= LEAST_TILES * tile * programs else None
    rows, used_rows = runs.starts, runs.used
    if runs.ends is not None:
        rows, used_rows = (
            torch.empty(H, max(runs.capacity, 1), dtype=torch.int32, device=query.device),
            runs.ends[:, -1],
        )
        list_rows(runs.starts, runs.ends, rows, runs.capacity)
    keys, stored, scales = softmax.in_words(runs)
    peaks, totals = torch.empty(2, H, programs, G, device=query.device)
    outputs = torch.empty(H, programs, G, D, device=query.device)
    merged = torch.empty(H, G, 1, D, dtype=query.dtype, device=query.device)
    _partial_kernel[(programs, H)](
        query, keys, stored, scales.rows, scales.channels, scales.offsets, scales.units,
        rows, query if used_rows is None else used_rows, *exact,
        query if exact_count is None else exact_count,
        logits, log_counts, values, query if stand_scales is None else stand_scales.words(),
        of_counts, of_taken,
        listed_logits, listed_counts, listed_values, listed_rows,
        query if used is None else used, query if queue is None else queue, peaks, totals, outputs,
        *keys.stride()[:2], scales.rows.stride(0), runs.capacity, rows.stride(0),
        0 if used_rows is None else used_rows.stride(0),
        E, exact[0].stride(0),
        C, logits.stride(1), log_counts.stride(0), values.stride(0), of_counts.stride(0),
        S, listed_logits.stride(1), listed_counts.stride(0), listed_rows.stride(0), listed_values.stride(0),
        0 if used is None else used.stride(0),
        softmax_scale, softcap or 0.0, CAPPED=softcap is not None,
        G=G, GROUP=group_rows(G), D=D, BLOCK_D=softmax.block_of(runs), TILE=tile,
        STAND_STAGES=STAND_STAGES, EXACT_STAGES=EXACT_STAGES, ROW_STAGES=form.stages,
        STAND_FIFTHS=stand_fifths, LISTED_FIFTHS=form.listed_fifths,
        QUEUED_PERCENT=0 if queue is None else QUEUED_PERCENT,
        LISTED=listed is not None, USED=used is not None, COUNTED=exact_count is not None,
        ROWS_USED=used_rows is not None, SCALED=runs.scales is not None, STANDS_SCALED=stand_scales is not None,
        LEFT=clusters is not None, PREFETCHED=PREFETCHED_ROWS if plain is not None and plain.ahead else 0,
        num_warps=form.warps, maxnreg=form.most_registers, **early,
    )  # fmt: skip
    softmax.merge(peaks, totals, outputs, sink_logits, merged, MERGED_COLUMNS)
    return merged[:, :, 0]
