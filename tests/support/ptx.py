"""Inline PTX in Triton's interpreter: numpy computes the instructions of the products of one row in fixed point."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

Word = np.ndarray
MASK = np.uint32(0xFFFF)


def _bytes(words: Word, kind: str = "u32") -> np.ndarray:
    """Split words into four bytes, the lowest first, signed for the kind `s32`."""
    parts = np.stack([(words >> np.uint32(8 * i)).astype(np.uint8) for i in range(4)], -1)
    return (parts.view(np.int8) if kind == "s32" else parts).astype(np.int64)


def _dot(a: Word, b: Word, c: Word, kinds: list[str]) -> Word:
    """Add the products of four bytes to c, modulo 2^32."""
    return (np.sum(_bytes(a, kinds[0]) * _bytes(b, kinds[1]), -1) + c.astype(np.int64)).astype(np.uint32)


def _permute(a: Word, b: Word, choice: Word) -> Word:
    """Choose four of the eight bytes of a and b."""
    eight = np.concatenate([_bytes(a), _bytes(b)], -1).astype(np.uint32)
    chosen = [(int(choice.flat[0]) >> 4 * i) & 7 for i in range(4)]
    return np.bitwise_or.reduce([eight[..., one] << np.uint32(8 * i) for i, one in enumerate(chosen)])


def _fma(a: Word, b: Word, c: Word) -> Word:
    """Compute a * b + c with one rounding; float64 is exact for the products of 16-bit floats and powers of two."""
    a, b, c = (one.view(np.float32).astype(np.float64) for one in (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
        return (a * b + c).astype(np.float32).view(np.uint32)


def _fma_bfloats(a: Word, b: Word, c: Word) -> Word:
    """Compute a * b + c of the low and of the high bfloat16; products of two bfloat16 are exact in float32."""

    def both(words: Word) -> list[torch.Tensor]:
        bits = [words << np.uint32(16), words & ~MASK]
        return [torch.from_numpy(one.view(np.float32)) for one in bits]

    pairs = [(x * y + z).bfloat16() for x, y, z in zip(both(a), both(b), both(c), strict=True)]
    low, high = (one.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) for one in pairs)
    return low | high << np.uint32(16)


def _largest_halves(a: Word, b: Word) -> Word:
    """Compute the maximum of the low 16 bits and of the high 16 bits."""
    high = np.maximum(a >> np.uint32(16), b >> np.uint32(16))
    return high << np.uint32(16) | np.maximum(a & MASK, b & MASK)


OPERATIONS: dict[str, Callable[..., Word]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "max.u32": np.maximum,
    "max.u16x2": _largest_halves,
    "fma.rn.f32": _fma,
    "fma.rn.bf16x2": _fma_bfloats,
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32),
    "lop3.b32": lambda a, b, c, table: a & b ^ c,  # table 0x6A, the only one that these products use
    "prmt.b32": _permute,
    "mad.lo.s32": lambda a, b, c: a * b + c,
}


def _run(code: str, registers: dict[str, np.ndarray], shape: tuple[int, ...]) -> None:
    """Run PTX instructions on arrays of 32-bit or 64-bit registers."""

    def value(word: str) -> np.ndarray:
        if word in registers:
            return registers[word]
        number = int(word[2:], 16) if word[:2] in ("0f", "0x") else int(word)
        return np.full(shape, number, np.uint32)

    for statement in re.sub(r"^\s*{|}\s*$", "", code).split(";"):
        operation, _, rest = statement.strip().partition(" ")
        words = [word.strip() for word in re.sub(r"[{}]", "", rest).split(",")]
        if operation == "mov.b64" and not rest.startswith("{"):
            whole, low, high = words
            registers[whole] = registers[low] | registers[high].astype(np.uint64) << np.uint64(32)
        elif operation == "mov.b64":
            *parts, whole = words
            size = 64 // len(parts)
            for i, part in enumerate(parts):
                bits = registers[whole].view(np.uint64) >> np.uint64(size * i)
                registers[part] = (bits & np.uint64(2**size - 1)).astype(np.uint32)
        elif operation.startswith("dp4a"):
            registers[words[0]] = _dot(*map(value, words[1:]), operation.split(".")[1:])
        elif operation and operation != ".reg":
            assert operation != "lop3.b32" or words[-1] == "0x6A"
            registers[words[0]] = OPERATIONS[operation](*map(value, words[1:]))


def _signed(words: np.ndarray) -> np.ndarray:
    return words.view(np.int64 if words.itemsize == 8 else np.int32)


def _inline(code: Any, constraints: str, arguments: list[Any], dtype: Any, **_: object) -> Any:
    """Replacement of `tl.inline_asm_elementwise`."""
    several = isinstance(dtype, tuple | tl.tuple)
    types = list(dtype) if several else [dtype]
    inputs = np.broadcast_arrays(*(one.handle.data for one in arguments))
    registers = {f"${number}": one.copy() for number, one in enumerate(inputs, len(types))}
    registers = {name: one if one.itemsize == 8 else one.view(np.uint32) for name, one in registers.items()}
    shape = inputs[0].shape
    _run(code.value, registers, shape)
    found = [
        tl.core.tensor(interpreter.TensorHandle(_signed(registers[f"${i}"]), of), tl.block_type(of, list(shape)))
        for i, of in enumerate(types)
    ]
    return tl.tuple(found) if several else found[0]


@contextmanager
def ptx_by_numpy() -> Iterator[None]:
    """Within the context, kernels in the interpreter may have inline PTX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl, "inline_asm_elementwise", _inline)
        patch.setattr(tl.core, "inline_asm_elementwise", _inline)
        yield
