"""Program that compiles launches of Triton kernels for a GPU, on a machine without one.

Triton's interpreter runs code that the compiler may refuse. Run the program with TRITON_INTERPRET=0. It compiles the
kernels of attention, of storing rows, of ranks by posting lists and by codes, of several queries over codes, of the
choice of clusters for several questions, of logits of int8 centroids, of products of one row, of rotated heads, and of
the sum over ranks.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekv.kernels.attention import decode_attention_triton, running_softmax_triton, shared_decode_triton
from sparsekv.kernels.attention.attention import OwnRows
from sparsekv.kernels.clusters import cluster_choice_triton, shared_choice_triton
from sparsekv.kernels.codes import code_choice_triton, code_ranks_triton, joint_ranks_triton
from sparsekv.kernels.codes.code_ranks import KeyCodes, LaidOutCodes, WeighedClusters, spans_of
from sparsekv.kernels.common import run_rows_triton
from sparsekv.kernels.common.kernel_inputs import Centroids, Int8Kernel, RowScales, RunRows, ScoredCentroids
from sparsekv.kernels.distributed import sum_triton
from sparsekv.kernels.distributed.shared_memory import bytes_shared
from sparsekv.kernels.linear import quantised_triton, rotated_heads_triton
from sparsekv.kernels.linear.quantised import RowNorm, Weight, round_to_int4, round_to_int8
from sparsekv.kernels.posting_lists import list_ranks_triton, top_ranks_triton
from sparsekv.kernels.posting_lists.list_ranks import ExactKeys, KeyGroups
from sparsekv.kernels.posting_lists.posting_lists import ListCodes
from sparsekv.kernels.scores import shares_triton

from .summing_ranks import add_up_all

TARGET, SHARED_MEMORY = GPUTarget("cuda", 90, 32), 227 * 1024  # of an H100 or H200
NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int16: "*i16"}
NAMES |= {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
OPTIONS = ("num_warps", "maxnreg")
H, G, B, M = 2, 4, 3, 640


class Compiler:
    """Replacement of a kernel: compiles the kernel for each launch, and runs nothing."""

    def __init__(self, kernel: Any):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *given: Any, **named: Any) -> None:
        values = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        signature, constants, divisible = {}, {}, {}
        for number, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = NAMES[value.dtype]
                divisible[(number,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                # As in a real launch: rows whose strides are multiples of 16 are loaded 16 bytes at a time.
                if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                    divisible[(number,)] = [["tt.divisibility", 16]]
        options = {name: value for name, value in named.items() if name in OPTIONS}
        source = ASTSource(self.kernel, signature, constants, divisible)
        self.compiled.append(triton.compile(source, target=TARGET, options=options))


def some_runs(D: int, dtype: torch.dtype, *, in_8_bits: bool) -> RunRows:
    """Return the rows of a launch, which are never read."""
    keys = torch.zeros(H, M, D, dtype=torch.int8 if in_8_bits else dtype)
    rows, queue = torch.zeros(H, M, dtype=torch.int32), torch.zeros(H, dtype=torch.int32)
    return RunRows(keys, keys, rows, None, M, None, queue, some_scales(M, D) if in_8_bits else None)


def some_scales(rows: int, D: int) -> RowScales:
    """Return scales of `rows` int8 rows."""
    scales, channels = torch.zeros(H, rows, 2, dtype=torch.bfloat16), torch.zeros(H, D, dtype=torch.bfloat16)
    return RowScales(scales, channels, channels, torch.zeros(H))


def some_centroids(D: int, dtype: torch.dtype, *, listed: bool, in_8_bits: bool) -> ScoredCentroids:
    """Return centroids of 48 clusters: listed clusters, or all clusters, which may be int8."""
    logits, counts, values = torch.zeros(H, G, 48), torch.zeros(H, 48), torch.zeros(H, 48, D, dtype=dtype)
    used = torch.zeros(H, dtype=torch.int32)
    if listed:
        return ScoredCentroids(logits, counts, values, torch.zeros(H, 48, dtype=torch.int32), used)
    if in_8_bits:
        return ScoredCentroids(logits, counts, values.to(torch.int8), None, used, some_scales(48, D))
    return ScoredCentroids(logits, counts, values, None, used)


def launch(D: int, dtype: torch.dtype, *, in_8_bits: bool, more: bool) -> None:
    """Compile a step of one sequence, and a step of several sequences that share rows.

    With `more`, the steps also have centroids, a soft cap and sinks.
    """
    runs, exact = some_runs(D, dtype, in_8_bits=in_8_bits), torch.zeros(H, 70, D, dtype=dtype)
    query, sinks = torch.zeros(H, G, D, dtype=dtype), torch.zeros(H, G) if more else None
    cap, count = (3.0, torch.zeros(1, dtype=torch.int32)) if more else (None, None)
    stands = [some_centroids(D, dtype, listed=listed, in_8_bits=in_8_bits) for listed in (False, True)] if more else []
    decode_attention_triton.decode_attention_triton(query, runs, (exact, exact), stands, 0.1, cap, sinks, count)
    kept, numbers = torch.zeros(B, H, 70, D, dtype=dtype), torch.zeros(B, dtype=torch.int64)
    own, together = OwnRows(kept, kept, numbers, numbers, numbers), torch.zeros(H, G, B, D, dtype=dtype)
    centroids = [Centroids(exact, exact, torch.zeros(H, 70))] if more else []
    shared_decode_triton.shared_decode_triton(together, runs, (exact, exact), centroids, own, 0.1, cap, sinks)
    shared_decode_triton.shared_logsumexp_triton(together, exact, own, 0.1, cap, sinks)
    run_rows_triton.store_in_slots_triton((kept, kept), (exact[:, :B], exact[:, :B]), numbers, numbers)


def score(D: int, dtype: torch.dtype) -> None:
    """Compile the logits of int8 centroids."""
    rows, counts = torch.zeros(H, 48, D, dtype=torch.int8), torch.zeros(H, 48, dtype=torch.int32)
    rounded = Int8Kernel(rows, rows, some_scales(48, D))
    cluster_choice_triton._launch(torch.zeros(H, G, D, dtype=dtype), rounded, counts, 0.1, 3.0)


def weigh(D: int, dtype: torch.dtype, *, more: bool) -> None:
    """Compile ranks by codes and by posting lists; with `more`, with a count of the exact keys, a soft cap and
    sinks."""
    query, keys = torch.zeros(H, G, D, dtype=dtype), torch.zeros(H, 70, D, dtype=dtype)
    exact = ExactKeys(keys, torch.zeros(1, dtype=torch.int32), torch.zeros(H, G, dtype=dtype))
    about = (exact if more else ExactKeys(keys)), 0.1, (3.0 if more else None)
    books, words = torch.zeros(H, 8, 256, D // 8).half(), torch.zeros(H, 2, 4096, dtype=torch.int32)
    codes = LaidOutCodes(torch.zeros(H, D, D).half(), books, words, 4096, spans_of(books))
    clusters = WeighedClusters(torch.zeros(H, 64, D, dtype=dtype), torch.zeros(H, 64).int(), torch.zeros(H, 64))
    groups = KeyGroups(torch.zeros(H, 4096, dtype=torch.int16), torch.zeros(H, 64, dtype=torch.int32))
    for few, many in (
        ((1, 1), (0, 1), (0, 0)) if more else ((1, 1),)
    ):  # limits in tiles per SM; these launches have less than one
        with patch.multiple(code_ranks_triton, MANY_TILES=few, MOST_TILES=many):
            ranks = code_ranks_triton.rank_codes_triton(query, codes, clusters, about[0], 100, *about[1:]).ranks
        with patch.object(top_ranks_triton, "MANY", few):
            top_ranks_triton.top_ranked_triton(ranks, 100, groups=groups)
    rows = torch.zeros(H, 4096, D, dtype=dtype), torch.zeros(H, 4096, D, dtype=dtype)
    code_choice_triton.best_by_codes_triton(query, codes, clusters, about[0], 100, groups.labels, rows, *about[1:])
    channels, steps = torch.arange(D, dtype=torch.int32).view(8, -1), torch.zeros(H, 8, 6)
    centroids, lists = torch.zeros(H, 8, 6, D // 8), torch.zeros(H, 8, 6, 512, dtype=torch.int32)
    found = ListCodes(lists, steps, steps, True, centroids, channels, torch.ones(H, 8), 4096)
    list_ranks_triton.rank_tokens_triton(query, found, about[0], 100, *about[1:])


def several(D: int, dtype: torch.dtype, softcap: float | None) -> None:
    """Compile ranks for all queries of a question together, and for several queries that choose by themselves."""
    books, words = torch.zeros(H, 8, 256, D // 8).half(), torch.zeros(H, 2, 4096, dtype=torch.int32)
    codes = KeyCodes(torch.zeros(H, D, D).half(), books, words, 4096)
    joint_ranks_triton.rank_jointly_triton(
        torch.zeros(H, 120, D, dtype=dtype), torch.zeros(H, 120), codes, 9, 0.1, softcap
    )
    clusters = WeighedClusters(torch.zeros(H, 64, D, dtype=dtype), torch.zeros(H, 64).int(), torch.zeros(H, 64))
    exact = ExactKeys(torch.zeros(H, 0, D, dtype=dtype), sinks=torch.zeros(H * B, G))
    laid_out = LaidOutCodes(codes.turn, books, words, 4096, spans_of(books))
    query = torch.zeros(H * B, G, D, dtype=dtype)
    code_ranks_triton.rank_codes_triton(query, laid_out, clusters, exact, 9, 0.1, softcap)
    groups = KeyGroups(torch.zeros(H, 4096, dtype=torch.int16), torch.zeros(H, 64, dtype=torch.int32))
    joint_ranks_triton.join_chosen_triton(torch.zeros(H, B, 9, dtype=torch.int32), 27, groups)


def choose(D: int, dtype: torch.dtype, questions: int, softcap: float | None) -> None:
    """Compile the choice of clusters for several questions of one token each."""
    query, ends = torch.zeros(H, G, questions, D, dtype=dtype), torch.arange(questions, dtype=torch.int32)
    centroids, counts = torch.zeros(H, 4096, D, dtype=dtype), torch.zeros(H, 4096, dtype=torch.int32)
    shared_choice_triton.choose_together_triton(query, ends, centroids, counts, counts, 640, M, 0.1, softcap)


def add_up(D: int, dtype: torch.dtype, softcap: float | None) -> None:
    """Compile the sum of attention to stored keys."""
    query, keys, seen = torch.zeros(70, D, dtype=dtype), torch.zeros(640, D, dtype=dtype), torch.ones(70).long()
    shares_triton.attention_shares_triton(query, keys, query, seen, torch.ones(70), 0.1, softcap)


def multiply(K: int, dtype: torch.dtype, outputs: tuple[int, ...], *, early: bool, biased: bool) -> None:
    """Compile joint products of one row with int8, 4-bit and unrounded weights.

    With `early`, as a dependent launch from Hopper on.
    """
    dense = [torch.zeros(count, K, dtype=dtype) for count in outputs]
    kinds: list[list[Weight]] = [[round_to_int8(one) for one in dense], [round_to_int4(one) for one in dense]]
    biases = [torch.zeros(count, dtype=dtype) if biased else None for count in outputs]
    with patch.object(quantised_triton, "dependent_launch", lambda _: {"EARLY": early}):
        for weights in (*kinds, dense):
            row = torch.zeros(1, K, dtype=dtype)
            quantised_triton.one_row_linears_triton(row, weights, biases)
            quantised_triton.one_row_linears_triton(
                row,
                weights[:1] * 2,
                biases[:1] * 2,
                norm=RowNorm(torch.zeros(K, dtype=dtype), 1e-6),
                gated=True,
                residual=torch.zeros(1, outputs[0], dtype=dtype),
            )


def rotate(D: int, dtype: torch.dtype, *, early: bool, normed: bool) -> None:
    """Compile the rotation of query and key heads."""
    angles, norms = torch.zeros(D, dtype=dtype), [RowNorm(torch.zeros(D, dtype=dtype), 1e-6)] * 2 if normed else []
    with patch.object(rotated_heads_triton, "dependent_launch", lambda _: {"EARLY": early}):
        rotated_heads_triton.rotated_heads_triton(torch.zeros(10 * D, dtype=dtype), 8, angles, angles, norms)


def main() -> None:
    """Compile all launches, print the number of kernels, and fail if a kernel does not fit an SM."""
    (
        partial, shared, own, merging, tables, scan, choice, place, look_up, logits, summing, joint, coarse, flag,
        count, lists, total, store, sums, scores, take, taken, weights, ranks,
        each_query, each_key, row, heads,
    ) = kernels = [
        Compiler(decode_attention_triton._partial_kernel),
        Compiler(shared_decode_triton._shared_kernel),
        Compiler(shared_decode_triton._own_kernel),
        Compiler(running_softmax_triton._merge_kernel),
        Compiler(code_ranks_triton._tables_kernel),
        Compiler(code_ranks_triton._scan_kernel),
        Compiler(code_choice_triton._choose_kernel),
        Compiler(top_ranks_triton._place_kernel),
        Compiler(list_ranks_triton._look_up_kernel),
        Compiler(cluster_choice_triton._logits_kernel),
        Compiler(sum_triton._sum_kernel),
        Compiler(joint_ranks_triton._joint_kernel),
        Compiler(joint_ranks_triton._coarse_kernel),
        Compiler(joint_ranks_triton._flag_kernel),
        Compiler(joint_ranks_triton._count_flags_kernel),
        Compiler(joint_ranks_triton._list_flags_kernel),
        Compiler(shared_decode_triton._logsumexp_kernel),
        Compiler(run_rows_triton._store_kernel),
        Compiler(shared_choice_triton._sums_kernel),
        Compiler(shared_choice_triton._scores_kernel),
        Compiler(shared_choice_triton._take_kernel),
        Compiler(shared_choice_triton._list_kernel),
        Compiler(list_ranks_triton._weights_kernel),
        Compiler(list_ranks_triton._rank_kernel),
        Compiler(shares_triton._logsumexp_kernel),
        Compiler(shares_triton._shares_kernel),
        Compiler(quantised_triton._one_row_kernel),
        Compiler(rotated_heads_triton._rotate_kernel),
    ]  # fmt: skip
    multiprocessors = {"count_sms": lambda _: 132}
    with (
        patch.multiple(decode_attention_triton, _partial_kernel=partial, **multiprocessors),
        patch.multiple(shared_decode_triton, _shared_kernel=shared, _own_kernel=own, **multiprocessors),
        patch.object(running_softmax_triton, "_merge_kernel", merging),
        patch.object(shared_decode_triton, "_logsumexp_kernel", total),
        patch.object(run_rows_triton, "_store_kernel", store),
        patch.object(code_ranks_triton, "_tables_kernel", tables),
        patch.multiple(code_ranks_triton, _scan_kernel=scan, **multiprocessors),
        patch.object(code_choice_triton, "_choose_kernel", choice),
        patch.multiple(top_ranks_triton, _place_kernel=place, **multiprocessors),
        patch.multiple(list_ranks_triton, _look_up_kernel=look_up, _weights_kernel=weights, _rank_kernel=ranks),
        patch.multiple(cluster_choice_triton, _logits_kernel=logits, **multiprocessors),
        patch.multiple(shares_triton, _logsumexp_kernel=each_query, _shares_kernel=each_key, **multiprocessors),
        patch.object(sum_triton, "_sum_kernel", summing),
        patch.object(quantised_triton, "_one_row_kernel", row),
        patch.object(rotated_heads_triton, "_rotate_kernel", heads),
        patch.multiple(joint_ranks_triton, _joint_kernel=joint, _coarse_kernel=coarse),
        patch.multiple(shared_choice_triton, _sums_kernel=sums, _scores_kernel=scores, **multiprocessors),
        patch.multiple(shared_choice_triton, _take_kernel=take, _list_kernel=taken, **multiprocessors),
        patch.multiple(joint_ranks_triton, _flag_kernel=flag, _count_flags_kernel=count, _list_flags_kernel=lists),
    ):
        launch(16, torch.float32, in_8_bits=True, more=False)
        launch(128, torch.bfloat16, in_8_bits=False, more=True)
        launch(96, torch.float16, in_8_bits=True, more=True)
        weigh(64, torch.float16, more=False)
        weigh(128, torch.bfloat16, more=True)
        several(64, torch.float32, 3.0)
        several(256, torch.bfloat16, None)
        choose(128, torch.bfloat16, 64, None)
        choose(256, torch.float32, 3, 3.0)
        score(96, torch.float32)
        score(128, torch.bfloat16)
        multiply(4160, torch.bfloat16, (33, 16, 5), early=True, biased=True)
        multiply(48, torch.float16, (16,), early=False, biased=False)
        multiply(40, torch.float32, (7, 7), early=True, biased=True)
        rotate(128, torch.bfloat16, early=True, normed=True)
        rotate(96, torch.float16, early=False, normed=False)
        add_up_all(0, [torch.zeros(bytes_shared(8), dtype=torch.uint8)] * 8, rounds=1)
    compiled = [one for kernel in kernels for one in kernel.compiled]
    for one in compiled:
        if one.metadata.shared > SHARED_MEMORY:
            sys.exit(f"{one.metadata.name} takes {one.metadata.shared:,} bytes of shared memory")
    print(len(compiled))


if __name__ == "__main__":
    main()
