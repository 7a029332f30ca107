"""Triton's interpreter without the repeated work that takes most of the time of our kernels' tests.

The interpreter calls the combining function of a `tl.reduce` or `tl.associative_scan` once for every element. Here all
pairs of neighbours are combined in one call, then all pairs of the results, as warps do. So a test fails for a function
that is not associative.

The interpreter prepares `triton.language` for each function that a kernel calls. Here it is prepared once for each
kernel. The interpreter makes its table of types for each type that it looks up. Here each type is looked up once. The
interpreter computes sums and products of integers again in 64 bits, for checks in debugging only. Here these checks are
left out.

The interpreter infers the type of a sum or a product each time. Here it is inferred once for two types, and a value
that has the type is not converted. For every value, the interpreter takes the shape apart and builds it again. Here
this is done once for each shape (`shapes.py`).
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
    """Within the context, reduce and scan tuples in log2(n) calls, and prepare the language once for each kernel."""
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
    """Apply the combining function of a reduction or a scan to arrays of any common shape."""
    arguments = [
        operation.to_tensor(array, one.dtype) for half in (left, right) for array, one in zip(half, inputs, strict=True)
    ]
    combined = operation.combine_fn.fn(*arguments)
    return [one.handle.data for one in (combined if isinstance(combined, tuple) else (combined,))]


def _reduce(operation: Any, inputs: Any) -> list[Any]:
    """Replacement of `ReduceOps.generic_reduce`."""
    inputs, axis = operation.unravel(inputs, operation.axis)
    arrays = [np.moveaxis(one.handle.data, axis, 0) for one in inputs]
    while len(arrays[0]) > 1:
        arrays = _combine(operation, [one[0::2] for one in arrays], [one[1::2] for one in arrays], inputs)
    whole = [np.moveaxis(one, 0, axis) if operation.keep_dims else one[0] for one in arrays]
    return [operation.to_tensor(one, of.dtype) for one, of in zip(whole, inputs, strict=True)]


def _scan(operation: Any, inputs: Any) -> list[Any]:
    """Replacement of `ScanOps.generic_scan`, whose caller reverses the input of a backward scan."""
    arrays = [np.moveaxis(one.handle.data, operation.axis, 0) for one in inputs]
    reach = 1
    while reach < len(arrays[0]):
        combined = _combine(operation, [np.roll(one, reach, 0) for one in arrays], arrays, inputs)
        arrays = [np.concatenate([old[:reach], new[reach:]]) for old, new in zip(arrays, combined, strict=True)]
        reach *= 2
    whole = [np.ascontiguousarray(np.moveaxis(one, 0, operation.axis)) for one in arrays]
    return [operation.to_tensor(one, of.dtype) for one, of in zip(whole, inputs, strict=True)]
