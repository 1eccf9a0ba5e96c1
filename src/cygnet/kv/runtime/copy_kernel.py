"""Many small copies in one call, as machine code."""

from typing import Any

from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic


@intrinsic
def _copy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)])
        target, source = (builder.inttoptr(address, byte) for address in args[:2])
        builder.call(memcpy, [target, source, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_POINTER = types.CPointer(types.int64)


@cfunc(types.void(_POINTER, _POINTER, _POINTER, types.int64), nopython=True, cache=True)
def copy(targets, sources, sizes, count):
    """memcpy of `sizes[i]` bytes from `sources[i]` to `targets[i]`, for `count` of them."""
    to, source, size = carray(targets, count), carray(sources, count), carray(sizes, count)
    for index in range(count):
        _copy(to[index], source[index], size[index])
