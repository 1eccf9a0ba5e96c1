"""What kernels are written in: raw typed memory, bf16 as fp32, an exponential that vectorises, atomics.

A kernel is `void(int64 *p)`. Any number of threads may run it at once with the same `p`; they share out its work by
`take`, so the result does not depend on how many there are:

    p[0]    next piece of work           p[1]    next thread's number
    p[2]..  addresses, sizes, floats (the bits of a double): as the kernel's `Kernel` packs them
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered; NaN and infinity keep their meaning."""

jit = njit(error_model="numpy", fastmath=FAST)
_SIGNATURE = types.void(types.CPointer(types.int64))


def compile_kernel(function: Callable[..., None]) -> Any:
    """`function(p)` as machine code with an `address`, from numba's cache on disk if it is there."""
    return cfunc(_SIGNATURE, nopython=True, cache=True, error_model="numpy", fastmath=FAST)(function)


def _pointer_to(numba_type: Any, ir_type: ir.Type) -> Any:
    @intrinsic
    def cast(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], ir_type.as_pointer())

        return types.CPointer(numba_type)(types.int64), generate

    return cast


i8_at = _pointer_to(types.int8, ir.IntType(8))
i16_at = _pointer_to(types.int16, ir.IntType(16))
i32_at = _pointer_to(types.int32, ir.IntType(32))
bf16_at = _pointer_to(types.uint16, ir.IntType(16))
i64_at = _pointer_to(types.int64, ir.IntType(64))
f32_at = _pointer_to(types.float32, ir.FloatType())
i32_at = _pointer_to(types.int32, ir.IntType(32))


@intrinsic
def shift(typing_context: Any, pointer: Any, count: Any) -> Any:
    """pointer + count elements"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), generate


@intrinsic
def load(typing_context: Any, pointer: Any, index: Any) -> Any:
    """pointer[index] as fp32; a uint16 is the upper half of one (bf16), an int8 is converted."""
    source = pointer.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.gep(args[0], [args[1]]))
        if source == types.uint16:
            wide = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(wide, ir.FloatType())
        return builder.sitofp(value, ir.FloatType()) if source == types.int8 else value

    return types.float32(pointer, types.int64), generate


@intrinsic
def store(typing_context: Any, pointer: Any, index: Any, value: Any) -> Any:
    """pointer[index] = value; to a uint16 rounded to the nearest bf16, ties to even, NaN kept."""
    target = pointer.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, wide = builder.gep(args[0], [args[1]]), args[2]
        if target == types.uint16:
            word = ir.IntType(32)
            bits = builder.bitcast(wide, word)
            odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
            is_nan = builder.fcmp_unordered("uno", wide, wide)
            upper = builder.lshr(builder.select(is_nan, ir.Constant(word, 0x7FC00000), rounded), ir.Constant(word, 16))
            wide = builder.trunc(upper, ir.IntType(16))
        builder.store(wide, address)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


@intrinsic
def as_float(typing_context: Any, word: Any) -> Any:
    """The fp32 whose bits an int32 is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def order(typing_context: Any, pointer: Any, index: Any) -> Any:
    """pointer[index] as an int32 that sorts as the float does; both zeros are 0, a NaN is above infinity."""
    source = pointer.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        value = builder.load(builder.gep(args[0], [args[1]]))
        bits = builder.zext(value, word) if source == types.uint16 else builder.bitcast(value, word)
        bits = builder.shl(bits, ir.Constant(word, 16 if source == types.uint16 else 0))
        size = builder.and_(bits, ir.Constant(word, 0x7FFFFFFF))
        infinity, zero = ir.Constant(word, 0x7F800000), ir.Constant(word, 0)
        negative = builder.and_(builder.icmp_signed("<", bits, zero), builder.icmp_unsigned("<=", size, infinity))
        return builder.select(negative, builder.neg(size), size)

    return types.int32(pointer, types.int64), generate


@intrinsic
def prefetch(typing_context: Any, pointer: Any, index: Any) -> Any:
    """Ask for the cache line of pointer[index]; no fault, whatever the address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        address = builder.bitcast(builder.gep(args[0], [args[1]]), byte)
        builder.call(function, [address, ir.Constant(word, 0), ir.Constant(word, 3), ir.Constant(word, 1)])
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


@intrinsic
def take(typing_context: Any, pointer: Any, index: Any) -> Any:
    """Atomically pointer[index] += 1; the value before. Also a barrier between memory accesses before and after."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", address, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.CPointer(types.int64), types.int64), generate


@intrinsic
def float_in(typing_context: Any, pointer: Any, index: Any) -> Any:
    """The fp64 whose bits are pointer[index], as fp32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(builder.gep(args[0], [args[1]]))
        return builder.fptrunc(builder.bitcast(bits, ir.DoubleType()), ir.FloatType())

    return types.float32(types.CPointer(types.int64), types.int64), generate


@intrinsic
def _power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 ** exponent for an integral fp32 of size up to 126."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.fptosi(args[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.float32), generate


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(87.0)
# exp(r) = 1 + r + r^2 * polynomial(r) for |r| <= ln(2) / 2, the classic coefficients of single precision.
_C0, _C1, _C2 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C3, _C4, _C5 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)


@njit(error_model="numpy", fastmath={"contract"})
def exp(x):
    """e ** x in fp32, to about an ulp, without a call: loops over it vectorise. |x| is cut at 87; NaN stays NaN."""
    cut = _LOWEST if x < _LOWEST else x
    cut = _HIGHEST if cut > _HIGHEST else cut
    n = np.floor(cut * _LOG2_E + _HALF)
    r = (cut - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    return (p * r * r + r + _ONE) * _power_of_two(n)
