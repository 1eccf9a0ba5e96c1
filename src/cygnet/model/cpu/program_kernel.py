"""Runs kernels one after the other, without returning to Python in between."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cygnet.model.cpu.jit import i64_at

_BYTES = ir.IntType(8).as_pointer()


def _calling(kind: ir.FunctionType, arguments: int) -> Any:
    """An intrinsic (function, arguments ...) that calls the function at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], kind.as_pointer())
        values = [
            builder.inttoptr(value, wanted) if wanted == _BYTES else builder.trunc(value, wanted)
            for value, wanted in zip(args[1:], kind.args, strict=True)
        ]
        builder.call(function, values)
        return context.get_dummy_value()

    if arguments == 1:

        @intrinsic
        def call(typing_context: Any, function: Any, p: Any) -> Any:
            return types.void(types.int64, types.int64), generate

        return call

    @intrinsic
    def start(typing_context: Any, function: Any, kernel: Any, p: Any, threads: Any, flags: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return start


_WORD = ir.IntType(32)
_call = _calling(ir.FunctionType(ir.VoidType(), [_BYTES]), 1)
_start = _calling(ir.FunctionType(ir.VoidType(), [_BYTES, _BYTES, _WORD, _WORD]), 4)


def program_f32(p):
    """For all dtypes.

    p[2] how many kernels; p[3] their addresses int64 [n]; p[4] their `p`, p[5] bytes of each; p[6] threads int64
    [n]; p[7] address of GOMP_parallel, or 0: all on this thread.
    """
    kernels, threads = i64_at(p[3]), i64_at(p[6])
    for i in range(p[2]):
        block = p[4] + i * p[5]
        counters = i64_at(block)
        counters[0] = 0
        counters[1] = 0
        if threads[i] == 1 or p[7] == 0:
            _call(kernels[i], block)
        else:
            _start(p[7], kernels[i], block, threads[i], 0)
