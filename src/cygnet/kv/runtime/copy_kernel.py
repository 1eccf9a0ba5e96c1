"""Many small copies in one call, as machine code.

Much memory is written past the caches, as memcpy does for one large piece: what is written need not be read first, and
what a model computes with meanwhile stays in the caches. `benchmarks/kv_copies.py` compares with memcpy.
"""

from typing import Any

from llvmlite import ir
from numba import carray, cfunc, types
from numba.extending import intrinsic

LINE = 64
"""Bytes written at a time past the caches; pieces must be whole lines for that."""
STREAM_BYTES = 1 << 20
"""From so many bytes on. Less is likely read again while a cache still has it."""
_WORDS = 4
"""64-bit words in a vector."""


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


@intrinsic
def _stream_line(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy `LINE` bytes, past the caches. `target` is a multiple of `LINE`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), _WORDS).as_pointer()
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        offsets = [ir.Constant(ir.IntType(64), offset) for offset in range(0, LINE, 8 * _WORDS)]
        sources, targets = (
            [builder.inttoptr(builder.add(start, offset), vector) for offset in offsets] for start in (args[1], args[0])
        )
        for value, place in zip([builder.load(place, align=8) for place in sources], targets, strict=True):
            builder.store(value, place, align=8 * _WORDS).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _fence(typing_context: Any) -> Any:
    """Whoever is told now sees what was written; writes past the caches are in no order otherwise."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_POINTER = types.CPointer(types.int64)


@cfunc(types.void(_POINTER, _POINTER, _POINTER, types.int64), nopython=True, cache=True)
def copy(targets, sources, sizes, count):
    """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]`, for `count` of them."""
    to, source, size = carray(targets, count), carray(sources, count), carray(sizes, count)
    streaming = size.sum() >= STREAM_BYTES
    for index in range(count):
        if streaming and to[index] % LINE == 0 and source[index] % 8 == 0 and size[index] % LINE == 0:
            for offset in range(0, size[index], LINE):
                _stream_line(to[index] + offset, source[index] + offset)
        else:
            _copy(to[index], source[index], size[index])
    if streaming:
        _fence()
