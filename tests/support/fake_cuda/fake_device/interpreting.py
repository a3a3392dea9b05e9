"""Triton's interpreter in about a third of its time, with bfloat16 as a device computes it.

It changes Triton's language once for the process, not at each call of a function; it makes no checks that a kernel on a
device lacks; and it does not make the same types and shapes anew for each operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

_patch_lang = interpreter._patch_lang
_broadcast: Callable[..., Any] = TritonSemantic.broadcast_impl_value
_of_others: Callable[..., TensorHandle] = InterpreterBuilder.binary_op
_between_floats: Callable[..., TensorHandle] = InterpreterBuilder.create_fp_to_fp
_np_dtype: Callable[..., Any] = cache(interpreter._get_np_dtype)


class _Unchanged:
    """Triton's language stays changed."""

    def restore(self) -> None:
        pass


def _widened(data: Any) -> Any:
    """Return the numbers of bfloat16, which the interpreter keeps as uint16, as float32."""
    return (data.astype(np.uint32) << 16).view(np.float32)


def _rounded(data: Any) -> Any:
    """Return numbers as bfloat16, rounded to the nearest and ties to even."""
    bits = np.asarray(data, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _cast(builder: InterpreterBuilder, source: Any, target: Any) -> TensorHandle:
    """Convert numbers; Triton's takes bfloat16 for integers unless the other type is float32."""
    data = _widened(source.data) if source.dtype.scalar == tl.bfloat16 else source.data
    if target.scalar == tl.bfloat16:
        return TensorHandle(_rounded(data), tl.bfloat16)
    return TensorHandle(data.astype(_np_dtype_of(target)), target.scalar)


def _convert(builder: InterpreterBuilder, source: Any, target: Any, rounding: Any) -> TensorHandle:
    """Convert floats; Triton's loses the carry where rounding to e4m3 reaches the next power of two."""
    if target.scalar != tl.float8e4nv:
        return _between_floats(builder, source, target, rounding)
    numbers = torch.from_numpy(np.clip(_numbers(source), -448, 448).astype(np.float32))
    return TensorHandle(numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), target.scalar)


def _binary(builder: InterpreterBuilder, left: Any, right: Any, operation: Any) -> TensorHandle:
    if left.dtype.scalar != tl.bfloat16:
        return _of_others(builder, left, right, operation)
    found = operation(_widened(left.data), _widened(right.data))
    return TensorHandle(_rounded(found) if found.dtype == np.float32 else found, tl.bfloat16)


def _dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *precision: Any) -> TensorHandle:
    """Multiply, in float64 so that no bit depends on the shape of a tile; Triton's takes bfloat16 for integers."""
    product = np.matmul(_numbers(a), _numbers(b))
    return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _numbers(handle: Any) -> Any:
    data, dtype = handle.data, handle.dtype.scalar
    if dtype == tl.bfloat16:
        data = _widened(data)
    elif dtype.is_floating() and dtype.primitive_bitwidth == 8:
        data = interpreter._convert_float(data, dtype, tl.float16, None).view(np.float16)
    return data.astype(np.float64) if dtype.is_floating() else data


@cache
def _shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def _new_tensor(tensor: Any, handle: Any, type: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.numel, tensor.shape = _shape_of(type.shape if type.is_block() else ())


@cache
def _checked(shape: tuple[int, ...]) -> int:
    number: int = core.validate_block_shape(shape)
    return number


def _new_block_type(block: Any, element_ty: Any, shape: Any) -> None:
    block.element_ty = element_ty
    block.shape = tuple([getattr(size, "value", size) for size in shape])
    if not block.shape:
        raise TypeError("0d block_type is forbidden")
    block.numel = _checked(block.shape)


def _np_dtype_of(dtype: Any) -> Any:
    if isinstance(dtype, core.block_type):
        dtype = dtype.element_ty
    return np.dtype(np.uint64) if isinstance(dtype, core.pointer_type) else _np_dtype(dtype)


def _broadcast_unequal(semantic: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
        return lhs, rhs
    return _broadcast(semantic, lhs, rhs)


def install() -> None:
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _dot, _cast
    InterpreterBuilder.binary_op, InterpreterBuilder.create_fp_to_fp = _binary, _convert
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
    changed: set[int] = set()

    def patch(function: Any) -> _Unchanged:
        names = id(function.__globals__)
        if names not in changed:
            changed.add(names)
            _patch_lang(function)
        return _Unchanged()

    interpreter._patch_lang = patch
    interpreter._get_np_dtype = _np_dtype_of
    TritonSemantic.broadcast_impl_value = _broadcast_unequal
    core.tensor.__init__ = _new_tensor
    core.block_type.__init__ = _new_block_type
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
