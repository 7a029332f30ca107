"""Compiles launches of Triton kernels for a GPU where there is none: run as a program, the two kernels of attention.

The interpreter runs what the compiler may refuse. To be run with TRITON_INTERPRET=0.
"""

import sys
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsekv.kernels.attention import decode_attention_triton, shared_decode_triton
from sparsekv.kernels.attention.shared_attention import OwnRows
from sparsekv.kernels.attention.types import RowScales, RunRows

TARGET, SHARED_MEMORY = GPUTarget("cuda", 90, 32), 227 * 1024  # of an H100 or H200
NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int16: "*i16"}
NAMES |= {torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("num_warps", "maxnreg")
H, G, B, M = 2, 4, 3, 640


class Compiler:
    """In a kernel's place: compiles what it would launch."""

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
        options = {name: value for name, value in named.items() if name in OPTIONS}
        source = ASTSource(self.kernel, signature, constants, divisible)
        self.compiled.append(triton.compile(source, target=TARGET, options=options))


def some_runs(D: int, dtype: torch.dtype, *, in_8_bits: bool) -> RunRows:
    """Rows that are never read."""
    keys = torch.zeros(H, M, D, dtype=torch.int8 if in_8_bits else dtype)
    scales, channels = torch.zeros(H, M, 2, dtype=torch.bfloat16), torch.zeros(H, D, dtype=torch.bfloat16)
    rows, queue = torch.zeros(H, M, dtype=torch.int32), torch.zeros(H, dtype=torch.int32)
    meant = RowScales(scales, channels, channels, torch.zeros(H)) if in_8_bits else None
    return RunRows(keys, keys, rows, None, M, None, queue, meant)


def launch(D: int, dtype: torch.dtype, runs: RunRows) -> None:
    """A step of one sequence, and one of several that share the rows."""
    exact = torch.zeros(H, 70, D, dtype=dtype)
    query = torch.zeros(H, G, D, dtype=dtype)
    decode_attention_triton.decode_attention_triton(query, runs, (exact, exact), (), 0.1)
    kept, numbers = torch.zeros(B, H, 70, D, dtype=dtype), torch.zeros(B, dtype=torch.int64)
    own, together = OwnRows(kept, kept, numbers, numbers, numbers), torch.zeros(H, G, B, D, dtype=dtype)
    shared_decode_triton.shared_decode_triton(together, runs, (exact, exact), (), own, 0.1)


def main() -> None:
    """Print how many kernels were compiled, and fail for one that would not fit a multiprocessor."""
    partial, shared = (
        Compiler(one) for one in (decode_attention_triton._partial_kernel, shared_decode_triton._shared_kernel)
    )
    nothing = MagicMock()
    with (
        patch.multiple(decode_attention_triton, _partial_kernel=partial, merge=nothing, count_sms=lambda _: 132),
        patch.multiple(shared_decode_triton, _shared_kernel=shared, merge=nothing, count_sms=lambda _: 132),
        patch.object(shared_decode_triton, "_own_kernel", nothing),
    ):
        for (D, dtype), in_8_bits in product(((16, torch.float32), (128, torch.bfloat16)), (False, True)):
            launch(D, dtype, some_runs(D, dtype, in_8_bits=in_8_bits))
    for one in partial.compiled + shared.compiled:
        if one.metadata.shared > SHARED_MEMORY:
            sys.exit(f"{one.metadata.name} takes {one.metadata.shared:,} bytes of shared memory")
    print(len(partial.compiled) + len(shared.compiled))


if __name__ == "__main__":
    main()
