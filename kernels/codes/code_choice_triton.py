"""`best_by_codes` in Triton: the first launch computes tables of products, the second scans the codes and chooses keys.

**The look-ups.** A program keeps four copies of the tables in shared memory, so that no two threads of a warp read the
same bank. Each bank has the entries of one part of the codes. A thread looks up the parts in an order of its own, which
begins with the part of its own bank.

**The wait.** A program ranks the keys of one tile, and keeps the ranks in registers. Which keys are chosen depends on
the counts of all tiles of the head. So a program writes the counts of its tile, adds 1 to the head's counter `arrived`,
and waits until the counter is the number of tiles. The first launch has set the counter to zero. The addition releases
the counts, and the read of the counter acquires them. In the interpreter, where no program can wait for another, a
launch that only counts comes before the launch that chooses.

**No deadlock.** A program waits only for programs of its own head. `_at_once` in `code_ranks.py` admits at most as many
programs as the GPU runs at the same time: two on each multiprocessor. With MOST_REGISTERS registers a thread and 32 KB
of shared memory a program, two fit. Other programs may occupy a multiprocessor at first, but they end without this
kernel: those of the first launch wait for no later launch, and those of the next launch start only after all waits.
Another stream may run this kernel, too. A GPU starts the programs of a grid in order, head by head, so at most one head
of each such grid is started in part. Only if such parts fill the whole GPU, no program can go on. With 64 tiles a head
and 132 multiprocessors, that needs five grids that were each interrupted while their programs started.

**Memory.** Allocates, for each head, a counter, 128 bytes a tile for the counts, 8 KB of tables, the clusters' logits,
partial sums and counts, and the chosen keys. Ranks are not written.
"""

import torch
import triton
import triton.language as tl

from sparsekv.kernels.codes.code_ranks import CENTROIDS, HEADROOM, LEVELS, CodeChoice
from sparsekv.kernels.codes.code_ranks_triton import _logsumexps, _partial_sums, _scores, make_tables
from sparsekv.kernels.common import tiles_triton as common
from sparsekv.kernels.common.launch import dependent_launch, power_of_two
from sparsekv.kernels.posting_lists import packed_triton as packed
from sparsekv.kernels.posting_lists.list_ranks import (
    FEW_RANKS,
    FINE,
    FINE_FROM,
    FRACTION_BITS,
    RANKS,
    lowest_rank,
)
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS
from sparsekv.kernels.posting_lists.top_ranks_triton import _first_of, _marks

BANKS, PARTS = tl.constexpr(32), tl.constexpr(8)
KEYS_OF_A_THREAD = tl.constexpr(16)
WARPS = TILE_TOKENS // (32 * KEYS_OF_A_THREAD.value)
MOST_REGISTERS = 128  # of a thread: then two programs fit on a multiprocessor

# Rotates a key's two words, together, right by the lane modulo 8 bytes; also returns the lane.
_ROTATE = tl.constexpr("""{
    .reg .b32 lane, turn, some, by, first, second, low, high;
    .reg .pred p;
    mov.u32 lane, %laneid;
    and.b32 turn, lane, 7;
    and.b32 some, turn, 4;
    setp.ne.u32 p, some, 0;
    selp.b32 first, $4, $3, p;
    selp.b32 second, $3, $4, p;
    and.b32 by, turn, 3;
    shl.b32 by, by, 3;
    shf.r.wrap.b32 low, first, second, by;
    shf.r.wrap.b32 high, second, first, by;
    mov.b32 $0, low;
    mov.b32 $1, high;
    mov.b32 $2, lane;
}""")


@triton.jit
def _place(byte, lane, at: tl.constexpr):
    """Compute the place of a code in the copied tables: of the part `at` parts after the lane's own."""
    COPIES: tl.constexpr = BANKS // PARTS
    # The place is computed as an address, four times as large, because the compiler then needs no multiplication.
    bank = ((lane + at) & (PARTS - 1)) * (4 * COPIES) + ((lane & 31) // PARTS) * 4
    return (byte * (4 * BANKS) + bank) >> 2


@triton.jit
def _four_places(word, lane, at: tl.constexpr):
    return tl.join(
        tl.join(_place(packed.byte_of(word, 0), lane, at), _place(packed.byte_of(word, 1), lane, at + 1)),
        tl.join(_place(packed.byte_of(word, 2), lane, at + 2), _place(packed.byte_of(word, 3), lane, at + 3)),
    )


@triton.jit
def _places(words, next_words):
    """Compute the places [..., 2, 2, 2] of keys' codes in the copied tables; the keys have two words each."""
    lane = tl.zeros_like(words)
    if not common.WIDEN:
        words, next_words, lane = tl.inline_asm_elementwise(
            _ROTATE, "=&r,=&r,=&r,r,r", [words, next_words], (tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )  # fmt: skip
    return tl.join(_four_places(words, lane, 0), _four_places(next_words, lane, 4))


def _counting(each: int) -> str:
    """Write the code by which a program counts ranks, `each` of every thread, in shared memory.

    The first warp writes the counts, two in a word, and then adds 1 to a counter.
    """
    lines = [
        ".shared .align 8 .b32 counts[64];",
        ".reg .pred p, q;",
        ".reg .b32 thread, at, base, one, two;",
        ".reg .b64 to;",
        "mov.u32 thread, %tid.x;",
        "mov.u32 base, counts;",
        "setp.lt.u32 p, thread, 64;",
        "shl.b32 at, thread, 2;",
        "add.u32 at, at, base;",
        "@p st.shared.b32 [at], 0;",
        "bar.sync 0;",
    ]
    for key in range(each):
        lines += [f"shl.b32 at, ${each + key}, 2;", "add.u32 at, at, base;", "red.shared.add.u32 [at], 1;"]
    lines += [
        "bar.sync 0;",
        "setp.lt.u32 p, thread, 32;",
        "shl.b32 at, thread, 3;",
        "add.u32 at, at, base;",
        "mov.b32 one, 0; mov.b32 two, 0;",
        "@p ld.shared.v2.b32 {one, two}, [at];",
        "shl.b32 two, two, 16;",
        "or.b32 one, one, two;",
        "mul.wide.u32 to, thread, 4;",
        f"add.u64 to, to, ${2 * each};",
        "@p st.global.b32 [to], one;",
        "bar.warp.sync 0xffffffff;",
        "setp.eq.u32 q, thread, 0;",
        f"@q red.release.gpu.global.add.u32 [${3 * each}], 1;",
    ]
    lines += [f"mov.b32 ${key}, 0;" for key in range(each)]
    return "{ " + " ".join(lines) + " }"


def _counting_operands(each: int) -> str:
    return ",".join(["=&r"] * each + ["r"] * each + ["l"] * (2 * each))


_COUNT = tl.constexpr(_counting(KEYS_OF_A_THREAD.value))
_COUNT_OPERANDS = tl.constexpr(_counting_operands(KEYS_OF_A_THREAD.value))


@triton.jit
def _count(rank, coarse, arrived, TILE: tl.constexpr, FEW_RANKS: tl.constexpr):
    """Write the counts of a tile's ranks, and count the tile as done."""
    if common.WIDEN:
        even, odd = tl.split(tl.reshape(tl.histogram(tl.reshape(rank, [TILE]), FEW_RANKS), [FEW_RANKS // 2, 2]))
        tl.store(coarse + tl.arange(0, FEW_RANKS // 2), even | (odd << 16))
    else:
        tl.inline_asm_elementwise(
            _COUNT, _COUNT_OPERANDS, [rank, coarse.to(tl.int64), arrived.to(tl.int64)], tl.int32, is_pure=False,
            pack=KEYS_OF_A_THREAD,
        )  # fmt: skip


@triton.jit
def _wait_for_all(counter, number):
    """Wait until `counter` is at least `number`; return 0. Every thread reads the counter itself."""
    if common.WIDEN:
        return 0
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 x; AGAIN: ld.acquire.gpu.global.b32 x, [$1]; setp.lt.s32 p, x, $2; @p bra AGAIN; "
        "mov.b32 $0, 0; }",
        "=r,l,r", [counter.to(tl.int64), number], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def _emitting(lines: int) -> str:
    """Write the code that does all that is to do for a chosen key: list it, count it, prefetch `lines` of its rows."""
    ahead = [f"prefetch.global.L2 [at+{128 * line}];" for line in range(lines)]
    code = [
        ".reg .pred p;",
        ".reg .b32 some;",
        ".reg .b64 at, by;",
        "mov.b32 $0, 0;",
        "shr.u32 some, $1, $3;",  # a shift by 0 to 31
        "and.b32 some, some, 1;",
        "setp.eq.u32 p, some, 0;",
        "@p bra DONE;",
        "mov.b32 some, 1;",
        "shl.b32 some, some, $3;",
        "sub.u32 some, some, 1;",
        "and.b32 some, some, $1;",
        "popc.b32 some, some;",
        "add.u32 some, some, $2;",
        "mul.wide.u32 at, some, 4;",
        "add.u64 at, at, $7;",
        "st.global.b32 [at], $4;",
        "mul.wide.u32 at, $5, 4;",
        "add.u64 at, at, $8;",
        "red.relaxed.gpu.global.add.u32 [at], 1;",
        "mul.wide.u32 by, $4, $6;",
        "add.u64 at, by, $9;",
        *ahead,
        "add.u64 at, by, $10;",
        *ahead,
        "DONE:",
    ]
    return "{ " + " ".join(code) + " }"


_EMIT_1, _EMIT_2 = tl.constexpr(_emitting(1)), tl.constexpr(_emitting(2))


@triton.jit
def _emit(taken, slot, bit, key, group, row_bytes, chosen, taken_of, key_rows, value_rows, LINES: tl.constexpr):
    """List the keys whose bits are set in `taken`, count their groups, and prefetch LINES lines of their rows."""
    if common.WIDEN:
        mask = ((taken >> bit) & 1) != 0
        place = slot + packed.set_bits(taken & ((1 << bit) - 1))
        tl.store(chosen + place, key, mask=mask)
        tl.atomic_add(taken_of + group, 1, mask=mask, sem="relaxed")
    else:
        code: tl.constexpr = _EMIT_1 if LINES == 1 else _EMIT_2
        tl.inline_asm_elementwise(
            code, "=&r,r,r,r,r,r,r,l,l,l,l",
            [taken, slot, bit, key, group, row_bytes, chosen.to(tl.int64), taken_of.to(tl.int64),
             key_rows.to(tl.int64), value_rows.to(tl.int64)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _bounds(coarse, wanted, tile, tiles, FEW_RANKS: tl.constexpr, ROWS: tl.constexpr):
    """Compute the results of `packed.bounds_of` from counts that other programs of this kernel wrote."""
    PAIRS: tl.constexpr = FEW_RANKS // 2
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PAIRS)
    words = tl.load(coarse + row * PAIRS + column, mask=row < tiles, other=0, cache_modifier=".cg")
    before = tl.where(row < tile, words, 0)
    even, odd, even_before, odd_before = tl.reduce(
        (words & 0xFFFF, words >> 16, before & 0xFFFF, before >> 16), 0, common.sum_of_four
    )
    every, of_these = tl.interleave(even, odd), tl.interleave(even_before, odd_before)
    rank = tl.arange(0, FEW_RANKS)
    last = tl.max(tl.where(tl.cumsum(every, 0, reverse=True) >= wanted, rank, 0), 0)
    above, first, equal = tl.reduce(
        (tl.where(rank > last, every, 0), tl.where(rank > last, of_these, 0), tl.where(rank == last, of_these, 0)),
        0, common.sum_of_three,
    )  # fmt: skip
    room = wanted - above
    return last, first + tl.minimum(equal, room), tl.maximum(room - equal, 0)


@triton.jit
def _choose(
    rank, coarse, arrived, labels, taken_of, chosen, key_rows, value_rows, tile, tiles, keys, wanted, row_bytes,
    FOURS: tl.constexpr, FEW_RANKS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the chosen keys of a tile with these ranks [FOURS, 4], and count them by group."""
    QUADS: tl.constexpr = FOURS // 8
    bit = tl.arange(0, 32)[None, :]
    key = tile * (4 * FOURS) + 32 * tl.arange(0, QUADS)[:, None] + bit
    group = tl.load(labels + key, mask=key < keys, other=0).to(tl.int32)
    words = tl.sum(rank << (8 * tl.arange(0, 4)), 1)
    words, next_words = tl.split(tl.reshape(words, [FOURS // 2, 2]))
    coarse += _wait_for_all(arrived, tiles)
    common.let_next_launch(EARLY)
    last, first, room = _bounds(coarse, wanted, tile, tiles, FEW_RANKS, ROWS)
    taken = _marks(words, next_words, last + 1, QUADS)
    equal = _marks(words, next_words, last, QUADS) ^ taken
    equals = packed.set_bits(equal)
    taking = tl.minimum(tl.maximum(room - (tl.cumsum(equals, 0) - equals), 0), equals)
    # Nearly all words take either all of their keys of the last rank, or none. `_first_of` handles the others.
    taken |= tl.where(taking == equals, equal, 0) | _first_of(equal, tl.where(taking == equals, 0, taking))
    number = packed.set_bits(taken)
    slot = first + tl.cumsum(number, 0) - number
    _emit(
        taken[:, None], slot[:, None], bit, key, group, row_bytes, chosen, taken_of, key_rows, value_rows, LINES
    )  # fmt: skip


@triton.jit(do_not_specialize=["keys", "least", "wanted"])
def _choose_kernel(
    words, tables, tops, steps, peaks, totals, coarse, arrived, labels, taken_of, chosen, key_rows, value_rows, keys,
    padded, sums, least, wanted, groups, labels_stride, head_stride, row_bytes, softcap, CHOOSES: tl.constexpr,
    CAPPED: tl.constexpr, SMALL: tl.constexpr, G: tl.constexpr, FEW: tl.constexpr, SUMS: tl.constexpr,
    CENTROIDS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, FRACTION_BITS: tl.constexpr, RANKS: tl.constexpr,
    FEW_RANKS: tl.constexpr, FINE_FROM: tl.constexpr, FINE: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rank and count the keys of a tile; with CHOOSES, wait for all tiles of the head, and choose among the keys."""
    tile, head, tiles = tl.program_id(0), tl.program_id(1).to(tl.int64), padded // TILE
    FOURS: tl.constexpr = TILE // 4
    i, g, p = tl.arange(0, FOURS)[:, None], tl.arange(0, FEW), tl.arange(0, PARTS)
    first = tile * TILE
    # The codes were written long before: they are loaded while the previous kernel runs.
    place = words + head * (PARTS // 4) * padded + first + 4 * i + tl.arange(0, 4)
    of_key, next_of_key = tl.load(place), tl.load(place + padded)
    common.only_wait(EARLY)
    part_peaks, part_totals = _partial_sums(peaks, totals, head, sums, g, G, SUMS)
    best = tl.load(tops + (head * G + g[:, None]) * PARTS + p, mask=(g < G)[:, None], other=0.0)
    COPIES: tl.constexpr = BANKS // PARTS
    entry = tl.max_contiguous(tl.arange(0, CENTROIDS * PARTS), 1)
    table = tl.load(tables + head * (CENTROIDS * PARTS) + entry)
    copied = tl.reshape(tl.broadcast_to(table[:, None], [CENTROIDS * PARTS, COPIES]), [CENTROIDS * BANKS])
    places = _places(of_key, next_of_key)
    found = tl.reshape(tl.gather(copied, tl.reshape(places, [TILE * PARTS]), 0), [FOURS, 4, PARTS])
    every, odd = tl.sum(found, 2), tl.sum(packed.second_and_fourth(found), 2)
    base, logsumexp = tl.sum(best, 1), _logsumexps(part_peaks, part_totals, g, G)
    score = _scores(every - (odd << 8), odd, 0, base, steps + head * G, logsumexp, g, softcap, CAPPED, G, SMALL)
    key = first + i // 8 * 32 + i % 8 + 8 * tl.arange(0, 4)
    score = score / G
    if first + TILE > keys:
        score = tl.where(key < keys, score, 0.0)
    rank = (score.to(tl.int32, bitcast=True) >> (23 - FRACTION_BITS)) - least
    rank = tl.minimum(tl.maximum(rank, 0), RANKS - 1)
    rank = (rank + 3 * tl.minimum(tl.maximum(rank - FINE_FROM, 0), FINE) + 1) >> 3
    _count(rank, coarse + (head * tiles + tile) * (FEW_RANKS // 2), arrived + head, TILE, FEW_RANKS)
    if CHOOSES:
        _choose(
            rank, coarse + head * tiles * (FEW_RANKS // 2), arrived + head, labels + head * labels_stride,
            taken_of + head * groups, chosen + head * wanted, key_rows + head * head_stride,
            value_rows + head * head_stride, tile, tiles, keys, wanted, row_bytes, FOURS, FEW_RANKS, ROWS, LINES, EARLY,
        )  # fmt: skip


def best_by_codes_triton(query, codes, clusters, exact, wanted, labels, rows, softmax_scale, softcap=None):
    """Run `best_by_codes` on a GPU; reads the codes and the clusters' keys once."""
    (H, G, D), device, padded = query.shape, query.device, codes.words.shape[2]
    query, tiles, (key_rows, value_rows) = query.contiguous(), padded // TILE_TOKENS, rows
    arrived = torch.empty(H, 1, dtype=torch.int32, device=device)
    coarse = torch.empty(H, tiles, FEW_RANKS // 2, dtype=torch.int32, device=device)
    chosen = torch.empty(H, wanted, dtype=torch.int32, device=device)
    made = make_tables(query, codes, clusters, exact, arrived, softmax_scale, softcap, by_code=True)
    for chooses in (False, True) if common.WIDEN.value else (True,):
        _choose_kernel[(tiles, H)](
            codes.words, made.tables, made.tops, made.steps, made.peaks, made.totals, coarse, arrived, labels,
            made.taken, chosen, key_rows, value_rows, codes.keys, padded, made.peaks.shape[2],
            lowest_rank(max(1, wanted >> HEADROOM)), wanted, made.taken.shape[1], labels.stride(0), key_rows.stride(0),
            key_rows.stride(1) * key_rows.element_size(), softcap or 0.0, CHOOSES=chooses, CAPPED=softcap is not None,
            SMALL=PARTS.value * LEVELS < 2048, G=G, FEW=power_of_two(G), SUMS=power_of_two(made.peaks.shape[2]),
            CENTROIDS=CENTROIDS, TILE=TILE_TOKENS, ROWS=power_of_two(tiles), FRACTION_BITS=FRACTION_BITS, RANKS=RANKS,
            FEW_RANKS=FEW_RANKS, FINE_FROM=FINE_FROM, FINE=FINE, LINES=D * key_rows.element_size() // 128,
            num_warps=WARPS, maxnreg=MOST_REGISTERS, **dependent_launch(device),
        )  # fmt: skip
    return CodeChoice(chosen, made.logits, made.taken, ahead=True)
