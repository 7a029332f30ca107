"""Triton's interpreter without the habits that take most of its time in our kernels' tests.

It calls the combining function of a `tl.reduce` or `tl.associative_scan` once for every element. Here neighbours are
combined all at once, then neighbours of those, as warps do: so a function that is not associative is found out too. It
prepares `triton.language` again for each function that a kernel calls; here once for each kernel. It makes its table of
types again for each type that it looks up. It computes each sum and product of integers again in 64 bits, and looks at
what came of it only in debugging. It infers the type of a sum or a
product again each time; here once for two types, and what has the type already is not converted. And for every value it
takes the shape apart, number by number, and puts it together again: here once for each shape (`shapes.py`).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .shapes import shapes_made_once


@contextmanager
def faster_interpreter() -> Iterator[None]:
    """While it lasts, tuples are reduced and scanned in log2(n) calls, and a language is prepared once a kernel."""
    options = interpreter.interpreter_builder.options
    prepare = interpreter._patch_lang

    numpy_type = interpreter._get_np_dtype
    computation_type, cast = TritonSemantic.computation_type_impl, TritonSemantic.cast
    languages: dict[str, list[Any]] = {}
    types: dict[str, Any] = {}
    of_two: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def prepare_once(function: Any) -> Any:
        if function.__module__ not in languages:
            modules = filter(inspect.ismodule, function.__globals__.values())
            languages[function.__module__] = [one for one in modules if one in (tl, tl.core)]
        here = languages[function.__module__]
        prepared = here and not any(tl.core.is_builtin(one.load) for one in here)
        return interpreter._LangPatchScope() if prepared else prepare(function)

    def numpy_type_of(one: Any) -> Any:
        scalar = one.scalar
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in types:
            types[name] = numpy_type(one)
        return types[name]

    def computation_type_of(self: Any, left: Any, plain: bool, right: Any, right_plain: bool, divided: bool) -> Any:
        key = left.name, plain, right.name, right_plain, divided
        if key not in of_two:
            of_two[key] = computation_type(self, left, plain, right, right_plain, divided)
        return of_two[key]

    def cast_to_another(self: Any, value: Any, wanted: Any, *rounding: Any) -> Any:
        return value if value.dtype is wanted else cast(self, value, wanted, *rounding)

    with shapes_made_once(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_of)
        patch.setattr(TritonSemantic, "computation_type_impl", computation_type_of)
        patch.setattr(TritonSemantic, "cast", cast_to_another)
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        patch.setattr(interpreter.ReduceOps, "generic_reduce", _reduce)
        patch.setattr(interpreter.ScanOps, "generic_scan", _scan)
        yield


def _combine(operation: Any, left: list[np.ndarray], right: list[np.ndarray], inputs: Any) -> list[np.ndarray]:
    """The combining function of a reduction or a scan, on arrays of any one shape."""
    arguments = [
        operation.to_tensor(array, one.dtype) for half in (left, right) for array, one in zip(half, inputs, strict=True)
    ]
    combined = operation.combine_fn.fn(*arguments)
    return [one.handle.data for one in (combined if isinstance(combined, tuple) else (combined,))]


def _reduce(operation: Any, inputs: Any) -> list[Any]:
    """Takes the place of `ReduceOps.generic_reduce`."""
    inputs, axis = operation.unravel(inputs, operation.axis)
    arrays = [np.moveaxis(one.handle.data, axis, 0) for one in inputs]
    while len(arrays[0]) > 1:
        arrays = _combine(operation, [one[0::2] for one in arrays], [one[1::2] for one in arrays], inputs)
    whole = [np.moveaxis(one, 0, axis) if operation.keep_dims else one[0] for one in arrays]
    return [operation.to_tensor(one, of.dtype) for one, of in zip(whole, inputs, strict=True)]


def _scan(operation: Any, inputs: Any) -> list[Any]:
    """Takes the place of `ScanOps.generic_scan`; its caller turns what is scanned backwards."""
    arrays = [np.moveaxis(one.handle.data, operation.axis, 0) for one in inputs]
    reach = 1
    while reach < len(arrays[0]):
        combined = _combine(operation, [np.roll(one, reach, 0) for one in arrays], arrays, inputs)
        arrays = [np.concatenate([old[:reach], new[reach:]]) for old, new in zip(arrays, combined, strict=True)]
        reach *= 2
    whole = [np.ascontiguousarray(np.moveaxis(one, 0, operation.axis)) for one in arrays]
    return [operation.to_tensor(one, of.dtype) for one, of in zip(whole, inputs, strict=True)]
